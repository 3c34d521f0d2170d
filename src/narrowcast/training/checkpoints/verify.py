"""`narrowcast verify-resume`: checks that a killed and resumed run is bit-exact."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    NarrowcastError,
    UnsupportedError,
)
from narrowcast.hardware import detect_hardware
from narrowcast.runs import Record, RunFolder, StepRecord, from_line, same_trajectory, to_line
from narrowcast.training.checkpoints.checkpoint import checkpoint_step, latest, load_checkpoint
from narrowcast.training.checkpoints.export import exported_tensors

NARROWCAST = (sys.executable, "-m", "narrowcast")
POLL_SECONDS = 0.005
"""Between two reads of the records of a run to kill; less than most steps take."""


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """Result of killing a run and resuming it."""

    steps: int
    killed_after: int
    """Last recorded step when the run was killed."""
    resumed_from: int
    """Step of the checkpoint it was resumed from; 0 for the start."""
    difference: str | None
    """First difference from the run that was not killed; None if bit-exact."""

    @property
    def equal(self) -> bool:
        """Whether records, weights, optimizer, loss scale and random state are the same."""
        return self.difference is None


def verify_resume(
    recipe: Recipe,
    overrides: Sequence[str],
    *,
    folder: Path,
    seed: int = 0,
    command: Sequence[str] = NARROWCAST,
) -> ResumeCheck:
    """Run `recipe` to its end, and again with a SIGKILL after a step chosen by `seed`; compare.

    On a GPU both runs are `deterministic`, unless `overrides` set it.
    """
    every = max(recipe.steps // 5, 1)
    if recipe.eval.patience:  # it may be over soon
        every = min(every, recipe.eval.every)
    overrides = [word for word in overrides if not word.startswith("checkpoint.every=")]
    on_gpu = torch.device(detect_hardware(recipe.device).device).type == "cuda"
    if on_gpu and not any(word.startswith("deterministic=") for word in overrides):
        # The fast kernels of a GPU differ from one run to the next, killed or not.
        overrides.append("deterministic=true")
    train = [*command, "train", *overrides, f"checkpoint.every={every}", "--out"]
    straight, resumed = folder / "straight", folder / "resumed"
    folder.mkdir(parents=True, exist_ok=True)
    _finish([*train, str(straight)], log=folder / "straight.log")
    last = latest(straight / "checkpoints")
    steps = recipe.steps if last is None else checkpoint_step(last)
    # After a checkpoint there is something to resume from; and a process is killed a moment after
    # the step that was waited for, by when it must not have ended.
    chosen = random.Random(seed).randint(every, max(steps * 3 // 4, every))
    killed_after = _kill([*train, str(resumed)], resumed, after=chosen, log=folder / "killed.log")
    checkpoint = latest(resumed / "checkpoints")
    _finish([*command, "resume", str(resumed)], log=folder / "resumed.log")
    return ResumeCheck(
        steps=steps,
        killed_after=killed_after,
        resumed_from=checkpoint_step(checkpoint) if checkpoint else 0,
        difference=difference_between(straight, resumed),
    )


def difference_between(a: Path, b: Path, *, but: Collection[str] = ()) -> str | None:
    """Return where two finished runs first differ, except in parts of the state named `but`."""
    with RunFolder.open(a) as one, RunFolder.open(b) as other:
        if text := _record_difference(one.records(), other.records()):
            return text
        last = [latest(run.checkpoints) for run in (one, other)]
    if last[0] is None or last[1] is None:
        return "one of the runs has no checkpoint"
    states = [load_checkpoint(path) for path in last if path is not None]
    for state in states:
        for name in ("records", *but):
            state.pop(name, None)
    return first_difference(*states, where="checkpoint") or first_difference(
        exported_tensors(a), exported_tensors(b)
    )


def _record_difference(a: list[Record], b: list[Record]) -> str | None:
    for number, (x, y) in enumerate(zip_longest(a, b), start=1):
        if x is None or y is None:
            return f"records: {len(a)} lines and {len(b)} lines"
        if not same_trajectory(x, y):
            return f"records, line {number}: {to_line(x)} and {to_line(y)}"
    return None


def _finish(command: Sequence[str], *, log: Path) -> None:
    """Run a process to its end, and raise if it failed."""
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    if done.returncode != 0:
        raise _failure(done.returncode, log)


def _kill(command: Sequence[str], folder: Path, *, after: int, log: Path) -> int:
    """Start a run, kill it after step `after`, and return its last recorded step."""
    records = folder / "records.jsonl"
    last, read = 0, 0
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            while process.poll() is None and last < after:
                time.sleep(POLL_SECONDS)
                last, read = _follow(records, last, read)
        finally:
            ranks = _children(process.pid)
            for doomed in (process.pid, *ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(doomed, signal.SIGKILL)
    if process.returncode == 0:
        raise UnsupportedError(
            f"The run must last until it is killed after step {after}, got a run that ended "
            "before. Give it more steps."
        )
    if process.returncode != -signal.SIGKILL:
        raise _failure(process.returncode, log)
    return _follow(records, last, read)[0]


def _children(parent: int) -> list[int]:
    """Return the processes that a process has started, such as the ranks of a run, on Linux."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last parenthesis may have spaces.
            if int(file.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(file.parent.name))
    return children


def _follow(records: Path, last: int, read: int) -> tuple[int, int]:
    """Return the last step in the records, and how far they were read."""
    if not records.exists():
        return last, read
    with records.open("rb") as file:
        file.seek(read)
        *lines, torn = file.read().split(b"\n")
        steps = [
            r.step for r in map(from_line, map(bytes.decode, lines)) if isinstance(r, StepRecord)
        ]
        return max([last, *steps]), file.tell() - len(torn)


def _failure(code: int, log: Path) -> NarrowcastError:
    kinds: dict[int, type[NarrowcastError]] = {
        ConfigError.exit_code: ConfigError,
        UnsupportedError.exit_code: UnsupportedError,
        DivergedError.exit_code: DivergedError,
    }
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
    return kinds.get(code, CheckpointError)(
        f"The run failed with exit code {code}: {' '.join(said)} (full log: {log})"
    )


def first_difference(a: Any, b: Any, *, where: str = "") -> str | None:
    """Return where and how two nested states first differ, or None if every bit is the same.

    NaN equals itself, -0.0 differs from 0.0, and 1 differs from 1.0.
    """
    if type(a) is not type(b) and not (isinstance(a, dict) and isinstance(b, dict)):
        return f"{where}: a {type(a).__name__} and a {type(b).__name__}"
    match a:
        case Tensor():
            return _tensor_difference(a, b, where)
        case dict():
            if keys := [key for key in [*a, *b] if (key in a) is not (key in b)]:
                return f"{where}: only one of the two has {keys[0]!r}"
            pairs = [(key, a[key], b[key]) for key in a]
        case list() | tuple():
            if len(a) != len(b):
                return f"{where}: {len(a)} items and {len(b)} items"
            pairs = [(key, *pair) for key, pair in enumerate(zip(a, b, strict=True))]
        case _:
            return None if repr(a) == repr(b) else f"{where}: {a!r} and {b!r}"
    inside = (
        first_difference(x, y, where=f"{where}/{key}" if where else str(key)) for key, x, y in pairs
    )
    return next((text for text in inside if text), None)


def _tensor_difference(a: Tensor, b: Tensor, where: str) -> str | None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{where}: {a.dtype} of {tuple(a.shape)} and {b.dtype} of {tuple(b.shape)}"
    bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    same = (bits[0] == bits[1]).view(a.numel(), -1).all(dim=1) if a.numel() else bits[0].bool()
    if same.all():
        return None
    first = int(same.logical_not().nonzero()[0])
    values = [t.detach().cpu().reshape(-1)[first].item() for t in (a, b)]
    return (
        f"{where}: {int((~same).sum())} of {a.numel()} values differ, the first at {first}: "
        f"{values[0]!r} and {values[1]!r}"
    )
