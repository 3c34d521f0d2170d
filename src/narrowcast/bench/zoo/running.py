"""Group after group of trials, each in a process of its own, until all are measured or time is up.

The trials of a group, one unless more are asked for, build, compile and warm up at the same time;
then they are timed one at a time. While a group is set up the next one may start and import, which
touches no device; it is done with that before anything is timed.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

import torch

from narrowcast.bench.running import terminated_like_interrupted
from narrowcast.bench.zoo.bars import verdicts
from narrowcast.bench.zoo.kept import Kept
from narrowcast.bench.zoo.models import ZOO, chosen, entry_of
from narrowcast.bench.zoo.turn import Turn
from narrowcast.bench.zoo.ways import WAYS, Trial, trials
from narrowcast.errors import RecipeError, UnsupportedError
from narrowcast.hardware import probe
from narrowcast.runs import describe_environment

Tell = Callable[[str], None]
Group = tuple[Trial, ...]
CORES_TO_START_AHEAD = 8
"""With fewer, a process that imports takes cores from one that compiles, whose time is told."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asked for; nothing named stands for all there is."""

    only: tuple[str, ...] = ()
    mine: str | None = None
    ways: tuple[str, ...] = ()
    """Kinds of them, or single ones."""
    modes: tuple[str, ...] = ()
    quick: bool = False
    seconds: float | None = None
    """After which no further group is started."""
    together: int = 1
    """How many rows are set up at the same time."""
    timeout_seconds: float = 600
    cold: bool = True
    """The processes of compiled rows begin with empty compiler caches."""
    kept: Path | None = None
    """Where rows are kept, and taken up again."""
    logs: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """What came of it."""

    data: dict[str, Any]
    """All of it, as plain data."""
    left_out: tuple[Trial, ...]
    """What there was no time for."""
    interrupted: bool


def measure_models(asked: Asked, *, tell: Tell) -> Zoo:
    """Measure what is asked for and not in the file yet."""
    names = chosen(asked.only, mine=asked.mine)
    wanted = trials(names, ways=asked.ways, modes=asked.modes)
    hardware = probe("auto")
    device = torch.device(hardware.device)
    if device.type != "cuda" and not asked.quick and any(name in ZOO for name in names):
        raise UnsupportedError(
            "the models of the zoo take a GPU, and there is none here; write --quick for tiny ones "
            "on a CPU, whose times mean nothing, or --mine package.module:build for your own"
        )
    environment = describe_environment()
    about = {
        "bench": "models",
        "environment": environment,
        "device": hardware.name,
        "torch": environment["torch"],
        "quick": asked.quick,
        "cold_caches": asked.cold,
    }
    kept = Kept(asked.kept, about=about)
    place = nullcontext(str(asked.logs)) if asked.logs else tempfile.TemporaryDirectory()
    with place as folder, terminated_like_interrupted():
        cores = environment["cores"]
        line = _Line(asked, kept, device=device, cores=cores, folder=Path(folder), tell=tell)
        interrupted = False
        try:
            line.run(wanted)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            line.end()
    left_out = tuple(trial for trial in wanted if trial not in line.tried)
    # Of tiny models, and of a CPU, nothing is claimed.
    judged = device.type == "cuda" and not asked.quick
    found = verdicts(kept.data()["rows"], cold=asked.cold) if judged else []
    more = {
        "interrupted": interrupted,
        "left_out": [str(trial) for trial in left_out],
        "judged": judged,
        "verdicts": [each.to_json() for each in found],
    }
    kept.write(**more)
    return Zoo(data=kept.data(**more), left_out=left_out, interrupted=interrupted)


@final
class _Line:
    """Trials that wait for their turn, and the processes of two groups of them at most."""

    def __init__(
        self,
        asked: Asked,
        kept: Kept,
        *,
        device: torch.device,
        cores: int,
        folder: Path,
        tell: Tell,
    ) -> None:
        self._asked, self._kept, self._device = asked, kept, device
        self._cores, self._folder, self._tell = cores, folder, tell
        self._turns: dict[Trial, Turn] = {}
        self._began, self._starts = time.monotonic(), 0
        self._failed_beside_others: list[Trial] = []
        self.tried: set[Trial] = set()

    def run(self, wanted: Sequence[Trial]) -> None:
        """Measure group after group, then those alone that failed beside others."""
        self.tried.update(trial for trial in wanted if self._kept.has(trial))
        if self.tried:
            self._tell(f"{len(self.tried)} of {len(wanted)} rows are kept from before")
        waiting = [trial for trial in wanted if trial not in self.tried]
        for trial in waiting:
            if missing := _missing(trial):
                self._fail(trial, missing)
        waiting = [trial for trial in waiting if trial not in self.tried]
        if self._measure_all(_groups(waiting, self._asked.together)):
            self._measure_all(_groups(self._failed_beside_others, 1))

    def end(self) -> None:
        """End every process."""
        for turn in self._turns.values():
            turn.end()
        self._turns.clear()

    def _measure_all(self, groups: Sequence[Group]) -> bool:
        """Measure groups; say whether there was time for all."""
        for group, following in zip_longest(groups, groups[1:], fillvalue=()):
            if self._is_late():
                self._tell(f"{self._asked.seconds:g} s are over: no further row is started")
                return False
            self._measure(group, following)
        return True

    def _measure(self, group: Group, following: Group) -> None:
        """Set all of a group up at the same time, then time one after another."""
        begin = time.monotonic()
        for trial in group:
            self._tell(f"{trial}: starting")
        turns = self._started(group)
        for turn in turns:
            turn.await_import()
            turn.ask("set up")
        starts_ahead = self._cores >= CORES_TO_START_AHEAD
        ahead = self._started(following) if starts_ahead else []
        for turn in turns:
            turn.answer()
        for turn in ahead:
            turn.await_import()
        # From here on all wait, or are over, but for the one that is timed.
        for trial, turn in zip(group, turns, strict=True):
            turn.ask("time")
            figures = turn.answer()
            turn.end()
            del self._turns[trial]
            if figures is None:
                self._fail(trial, turn.why, log=turn.log(), beside_others=len(group) > 1)
            else:
                self._keep(trial, {"row_seconds": time.monotonic() - begin, **figures})

    def _started(self, group: Group) -> list[Turn]:
        """Start the processes of a group, unless they were started ahead."""
        for trial in group:
            if trial not in self._turns:
                self._starts += 1
                job = {
                    "bench": "models",
                    "trial": asdict(trial),
                    "device": str(self._device),
                    "quick": self._asked.quick,
                    "together": len(group),
                    "started": time.time(),
                }
                self._turns[trial] = Turn(
                    trial,
                    job,
                    folder=self._folder / f"{self._starts:03}",
                    timeout_seconds=self._asked.timeout_seconds,
                    # What is judged is the first step of compiled rows; others need not compile
                    # kernels anew.
                    cold=self._asked.cold and trial.mode == "compiled",
                )
        return [self._turns[trial] for trial in group]

    def _is_late(self) -> bool:
        limit = self._asked.seconds
        return limit is not None and time.monotonic() - self._began >= limit

    def _keep(self, trial: Trial, figures: Mapping[str, Any]) -> None:
        self.tried.add(trial)
        self._kept.add(trial, {"failure": "", **figures})
        first, row = figures["first_step_seconds"], figures["row_seconds"]
        self._tell(f"{trial}: {figures['ms']:.2f} ms, first step {first:.1f} s, row {row:.0f} s")

    def _fail(
        self, trial: Trial, why: str, *, log: Sequence[str] = (), beside_others: bool = False
    ) -> None:
        self._tell(f"{trial}: {why}")
        own = trial.model not in ZOO
        if own and why.startswith("RecipeError: "):
            raise RecipeError(why.removeprefix("RecipeError: "))  # every row would say the same
        if beside_others:
            self._tell(f"{trial}: is tried again, alone, after all others")
            self._failed_beside_others.append(trial)
            return
        self.tried.add(trial)
        self._kept.add(trial, {"failure": why, "log": list(log)})


def _groups(trials: Sequence[Trial], size: int) -> list[Group]:
    """Cut trials into groups; those that compile, which takes minutes, keep no others waiting."""
    if size == 1:
        return [(trial,) for trial in trials]
    compiled = [trial for trial in trials if trial.mode == "compiled"]
    launched = [trial for trial in trials if trial.mode != "compiled"]
    return [
        tuple(of[first : first + size])
        for of in (compiled, launched)
        for first in range(0, len(of), size)
    ]


def _missing(trial: Trial) -> str:
    return entry_of(trial.model).missing or WAYS[trial.way].missing
