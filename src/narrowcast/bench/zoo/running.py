"""Measures rows of `bench models`, each in a process of its own and timed one at a time."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from narrowcast.bench.process import Worker, sigterm_interrupts
from narrowcast.bench.zoo.models import ZOO, get_entry, select_models
from narrowcast.bench.zoo.ways import MODES, WAYS, ZooTrial, trials
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.runs import describe_environment
from narrowcast.runs.strict_json import dumps, loads
from narrowcast.runs.writing import replace_file

Log = Callable[[str], None]
Group = tuple[ZooTrial, ...]


@dataclass(frozen=True, kw_only=True)
class ZooRequest:
    """Settings of `bench models`; an empty list selects everything."""

    only: tuple[str, ...] = ()
    mine: str | None = None
    ways: tuple[str, ...] = ()
    """Kinds of ways, or single ones."""
    modes: tuple[str, ...] = ()
    quick: bool = False
    seconds: float | None = None
    """After so many no further group is started."""
    together: int = 1
    """Rows that are set up at the same time."""
    timeout_seconds: float = 600
    cold: bool = True
    """Compiled rows begin with empty compiler caches."""
    results_path: Path | None = None
    """File of rows that is continued."""
    logs: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """What was measured."""

    data: dict[str, Any]
    left_out: tuple[ZooTrial, ...]
    """Rows there was no time for."""
    interrupted: bool


def measure_models(request: ZooRequest, *, log: Log) -> Zoo:
    """Measure the requested rows that the file does not have yet."""
    names = select_models(request.only, mine=request.mine)
    requested = trials(names, ways=request.ways, modes=request.modes)
    hardware = detect_hardware("auto")
    device = torch.device(hardware.device)
    if device.type != "cuda" and not request.quick and any(name in ZOO for name in names):
        raise UnsupportedError(
            "bench models needs a GPU, and this machine has none. Use --quick for tiny models "
            "on a CPU, whose times mean nothing, or --mine package.module:build for your own."
        )
    environment = describe_environment()
    about = {
        "bench": "models",
        "environment": environment,
        "device": hardware.name,
        "torch": environment["torch"],
        "quick": request.quick,
        "cold_caches": request.cold,
    }
    saved = SavedRows(request.results_path, about=about)
    place = nullcontext(str(request.logs)) if request.logs else tempfile.TemporaryDirectory()
    interrupted = False
    with place as folder, sigterm_interrupts():
        groups = _Groups(request, saved, device=device, folder=Path(folder), log=log)
        try:
            groups.run(requested)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            groups.kill_all()
    left_out = tuple(trial for trial in requested if trial not in groups.done)
    more = {"interrupted": interrupted, "left_out": [str(trial) for trial in left_out]}
    saved.write(**more)
    return Zoo(data=saved.data(**more), left_out=left_out, interrupted=interrupted)


SAME = ("bench", "device", "torch", "quick", "cold_caches")
"""What rows that are compared must have in common."""


@final
class SavedRows:
    """Rows, and the file they are in, if any."""

    def __init__(self, path: Path | None, *, about: Mapping[str, Any]) -> None:
        """Read the file if it exists."""
        self._path, self._about = path, dict(about)
        self.rows: dict[ZooTrial, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def has(self, trial: ZooTrial) -> bool:
        """Return whether a trial has figures; one that failed is tried again."""
        return trial in self.rows and not self.rows[trial]["failure"]

    def add(self, trial: ZooTrial, row: Mapping[str, Any]) -> None:
        self.rows[trial] = {**asdict(trial), **row}
        self.write()

    def data(self, **more: Any) -> dict[str, Any]:
        """Return plain data, rows in the order of the zoo."""
        models = list(dict.fromkeys(trial.model for trial in self.rows))
        order = [*ZOO, *(name for name in models if name not in ZOO)]
        ways = list(WAYS)

        def sort_key(trial: ZooTrial) -> tuple[int, int, int]:
            return order.index(trial.model), ways.index(trial.way), MODES.index(trial.mode)

        rows = [self.rows[trial] for trial in sorted(self.rows, key=sort_key)]
        return {**self._about, **more, "rows": rows}

    def write(self, **more: Any) -> None:
        if self._path is not None:
            replace_file(self._path, (dumps(self.data(**more), indent=1) + "\n").encode())

    def _read(self, path: Path) -> None:
        try:
            saved = loads(path.read_text(encoding="utf-8"))
            about = {name: saved[name] for name in SAME}
            rows = {
                ZooTrial(model=row["model"], way=row["way"], mode=row["mode"]): row
                for row in saved["rows"]
                if isinstance(row["failure"], str) and (row["failure"] or row["ms"] > 0)
                if row["way"] in WAYS and row["mode"] in MODES
            }
        except (OSError, ValueError, TypeError, LookupError):
            raise ConfigError(
                f"--json {path} exists and was not written by bench models. Name another file."
            ) from None
        unlike = [name for name in SAME if about[name] != self._about[name]]
        if unlike:
            differences = ", ".join(
                f"{name} {about[name]} instead of {self._about[name]}" for name in unlike
            )
            raise ConfigError(
                f"--json {path} has rows of {differences}, which cannot be compared. Name another "
                "file."
            )
        self.rows = rows


@final
class _Groups:
    """Measures group after group."""

    def __init__(
        self,
        request: ZooRequest,
        saved: SavedRows,
        *,
        device: torch.device,
        folder: Path,
        log: Log,
    ) -> None:
        self._request, self._saved, self._device = request, saved, device
        self._folder, self._log = folder, log
        self._workers: dict[ZooTrial, Worker] = {}
        self._began, self._starts = time.monotonic(), 0
        self._failed_in_parallel: list[ZooTrial] = []
        self.done: set[ZooTrial] = set()

    def run(self, requested: Sequence[ZooTrial]) -> None:
        """Measure all groups, then rows alone that failed beside others."""
        self.done.update(trial for trial in requested if self._saved.has(trial))
        if self.done:
            self._log(f"{len(self.done)} of {len(requested)} rows are in the file already")
        for trial in requested:
            missing = get_entry(trial.model).missing or WAYS[trial.way].missing
            if missing and trial not in self.done:
                self._fail(trial, missing)
        waiting = [trial for trial in requested if trial not in self.done]
        if self._measure_all(_groups(waiting, self._request.together)):
            self._measure_all(_groups(self._failed_in_parallel, 1))

    def kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def _measure_all(self, groups: Sequence[Group]) -> bool:
        """Measure groups; return whether there was time for all."""
        limit = self._request.seconds
        for group in groups:
            if limit is not None and time.monotonic() - self._began >= limit:
                self._log(f"{limit:g} s have passed: no more rows are started")
                return False
            self._measure(group)
        return True

    def _measure(self, group: Group) -> None:
        """Set up a group at the same time, then time its rows one after another."""
        begin = time.monotonic()
        self._workers = {trial: self._start(trial, together=len(group)) for trial in group}
        for worker in self._workers.values():
            worker.answer()
        # From here on, all have ended or wait but for the one that is timed.
        for trial, worker in self._workers.items():
            worker.request({})
            figures = worker.answer()
            worker.kill()
            if figures is None:
                self._fail(trial, worker.failure, log=worker.tail(), in_parallel=len(group) > 1)
            else:
                self._save(trial, {"row_seconds": time.monotonic() - begin, **figures})

    def _start(self, trial: ZooTrial, *, together: int) -> Worker:
        self._log(f"{trial}: starting")
        self._starts += 1
        return Worker(
            {
                "bench": "models",
                "trial": asdict(trial),
                "device": str(self._device),
                "quick": self._request.quick,
                "together": together,
            },
            folder=self._folder / f"{self._starts:03}",
            timeout_seconds=self._request.timeout_seconds,
            # Only the first steps of compiled rows are compared.
            cold=self._request.cold and trial.mode == "compiled",
        )

    def _save(self, trial: ZooTrial, figures: Mapping[str, Any]) -> None:
        self.done.add(trial)
        self._saved.add(trial, {"failure": "", **figures})
        first, row = figures["first_step_seconds"], figures["row_seconds"]
        self._log(f"{trial}: {figures['ms']:.2f} ms, first step {first:.1f} s, row {row:.0f} s")

    def _fail(
        self, trial: ZooTrial, reason: str, *, log: Sequence[str] = (), in_parallel: bool = False
    ) -> None:
        self._log(f"{trial}: {reason}")
        if trial.model not in ZOO and reason.startswith("ConfigError: "):
            raise ConfigError(reason.removeprefix("ConfigError: "))  # every row would fail like it
        if in_parallel:
            self._log(f"{trial}: will be retried alone")
            self._failed_in_parallel.append(trial)
            return
        self.done.add(trial)
        self._saved.add(trial, {"failure": reason, "log": list(log)})


def _groups(trials: Sequence[ZooTrial], size: int) -> list[Group]:
    """Split trials into groups; with several per group, compiled ones come first and separately."""
    if size == 1:
        return [(trial,) for trial in trials]
    compiled = [trial for trial in trials if trial.mode == "compiled"]
    others = [trial for trial in trials if trial.mode != "compiled"]
    return [
        tuple(part[first : first + size])
        for part in (compiled, others)
        for first in range(0, len(part), size)
    ]
