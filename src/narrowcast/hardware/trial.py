"""Try native 16-bit products on this CPU in a child process, once per machine and torch version."""

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

# Medians of five products of 512³ after two warm-up calls: about 10 ms a format, long enough to
# tell 0.5 × from 90 ×, which is all that is decided here.
_SCRIPT = """
import sys, time, torch
def seconds(dtype):
    a = torch.randn(512, 512).to(dtype)
    b = torch.randn(512, 512).to(dtype)
    a @ b; a @ b
    times = []
    for _ in range(5):
        start = time.perf_counter(); a @ b; times.append(time.perf_counter() - start)
    return sorted(times)[2]
print(seconds(getattr(torch, sys.argv[1])) / seconds(torch.float32))
"""
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
_TIME_LIMIT_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class CpuTrial:
    """What came of one native product."""

    died: bool
    slowdown: float
    """Its time relative to the fp32 product; 0 if the process died."""


def try_products(formats: Sequence[str], *, store: Path | None = None) -> Mapping[str, CpuTrial]:
    """Run one native product per format, cached; takes some seconds the first time."""
    store = store or default_store()
    known = _load(store)
    fresh = {name: _try(name) for name in formats if name not in known}
    if fresh:
        keep_trials(store, {**known, **fresh})
    return {name: (known | fresh)[name] for name in formats}


def _try(name: str) -> CpuTrial:
    command = [sys.executable, "-c", _SCRIPT, _DTYPE_NAMES[name]]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIME_LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return CpuTrial(died=False, slowdown=float(_TIME_LIMIT_SECONDS))
    if done.returncode != 0:
        return CpuTrial(died=True, slowdown=0.0)
    return CpuTrial(died=False, slowdown=float(done.stdout.split()[-1]))


def default_store() -> Path:
    """Return the file that holds what was tried on this machine, with this torch."""
    machine = f"{platform.node()} {platform.machine()} {torch.__version__} {_cpu_identity()}"
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return cache_folder() / f"cpu-products-{digest}.json"


def cache_folder() -> Path:
    """Return where what was measured on this machine is kept for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowcast"


def _cpu_identity() -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    head = path.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    # Clock rates change from one reading to the next; what the CPU is does not.
    return "\n".join(line for line in head.splitlines() if "MHz" not in line)


def _load(store: Path) -> dict[str, CpuTrial]:
    try:
        result = json.loads(store.read_text()).items()
        return {name: CpuTrial(**values) for name, values in result if _is_sound(**values)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # never tried here, or a damaged file: try again


def _is_sound(died: object, slowdown: object) -> bool:
    """Return whether values read from a file can have been measured."""
    measured = isinstance(slowdown, float) and 0 < slowdown < math.inf
    return died is True or (died is False and measured)


def keep_trials(store: Path, trials: Mapping[str, CpuTrial]) -> None:
    """Store the results of trials for later processes."""
    text = json.dumps({name: asdict(trial) for name, trial in trials.items()})
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        extra = store.with_suffix(f".{os.getpid()}")
        extra.write_text(text)
        extra.replace(store)
    except OSError:
        return  # a read-only home: the next process tries again, nothing else is lost
