"""One trial after another, each in a process of its own, until all are measured or time is up.

Only one process is on the device at any time. While it builds, compiles and warms up, the next one
may start and import, which touches no device; it is done with that before anything is timed.
"""

import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

import torch

from narrowcast.bench.contenders import Contender
from narrowcast.bench.process import Inbox, Worker
from narrowcast.bench.running import terminated_like_interrupted
from narrowcast.bench.zoo.bars import verdicts
from narrowcast.bench.zoo.kept import Kept
from narrowcast.bench.zoo.models import ZOO, chosen, entry_of
from narrowcast.bench.zoo.ways import WAYS, Trial, trials
from narrowcast.errors import RecipeError, UnsupportedError
from narrowcast.hardware import probe
from narrowcast.runs import describe_environment

Tell = Callable[[str], None]
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
    """After which no further row is started."""
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
class _Turn:
    """One trial's process."""

    def __init__(self, trial: Trial, job: dict[str, Any], *, folder: Path, asked: Asked) -> None:
        self._inbox: Inbox = queue.SimpleQueue()
        self._timeout = asked.timeout_seconds
        self._imported: bool | None = None
        self.why = ""
        """Why there is no more to hear of it."""
        contender = Contender(name=str(trial), kind=WAYS[trial.way].kind)
        # What is judged is the first step of compiled rows; others need not compile kernels anew.
        cold = asked.cold and trial.mode == "compiled"
        self._worker = Worker(contender, job, folder=folder, inbox=self._inbox, cold=cold)

    def imported(self) -> bool:
        """Wait until it has imported what it needs; say whether it has."""
        if self._imported is None:
            self._imported = all(self._heard() is not None for _ in ("alive", "ready"))
        return self._imported

    def ask(self, stage: str) -> None:
        """Ask it to set up, or to time its steps."""
        self._worker.ask({"stage": stage})

    def answer(self) -> dict[str, Any] | None:
        """Wait for what it found; None where there will be nothing."""
        found = self._heard()
        return found and {name: value for name, value in found.items() if name != "event"}

    def end(self) -> None:
        """End the process."""
        self._worker.kill()

    def log(self) -> list[str]:
        """Return the last lines of its log."""
        return self._worker.tail()

    def _heard(self) -> dict[str, Any] | None:
        if self.why:
            return None
        try:
            _, answer = self._inbox.get(timeout=self._timeout)
        except queue.Empty:
            self.why = f"no answer for {self._timeout:g} s, so it was ended"
            return None
        if answer is None:
            self.why = self._worker.reason()
        return answer


@final
class _Line:
    """Trials that wait for their turn, and the processes of two of them at most."""

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
        self._turns: dict[Trial, _Turn] = {}
        self._began, self._starts = time.monotonic(), 0
        self.tried: set[Trial] = set()

    def run(self, wanted: Sequence[Trial]) -> None:
        """Measure one after another."""
        self.tried.update(trial for trial in wanted if self._kept.has(trial))
        if self.tried:
            self._tell(f"{len(self.tried)} of {len(wanted)} rows are kept from before")
        waiting = [trial for trial in wanted if trial not in self.tried]
        for trial in waiting:
            if missing := _missing(trial):
                self._fail(trial, missing)
        waiting = [trial for trial in waiting if trial not in self.tried]
        for trial, following in zip_longest(waiting, waiting[1:]):
            if self._is_late():
                self._tell(f"{self._asked.seconds:g} s are over: no further row is started")
                return
            self._one(trial, following)

    def end(self) -> None:
        """End every process."""
        for turn in self._turns.values():
            turn.end()
        self._turns.clear()

    def _one(self, trial: Trial, following: Trial | None) -> None:
        self._tell(f"{trial}: starting")
        begin, turn = time.monotonic(), self._turn(trial)
        figures = self._figures(turn, following)
        log = [] if figures else turn.log()
        turn.end()
        del self._turns[trial]
        if figures is None:
            self._fail(trial, turn.why, log=log)
            return
        took = time.monotonic() - begin
        self.tried.add(trial)
        self._kept.add(trial, {"failure": "", "row_seconds": took, **figures})
        first = figures["first_step_seconds"]
        self._tell(f"{trial}: {figures['ms']:.2f} ms, first step {first:.1f} s, row {took:.0f} s")

    def _figures(self, turn: _Turn, following: Trial | None) -> dict[str, Any] | None:
        """Return what is measured of a trial, or None."""
        if not turn.imported():
            return None
        turn.ask("set up")
        ahead = None
        if following is not None and self._cores >= CORES_TO_START_AHEAD:
            ahead = self._turn(following)
        if turn.answer() is None:
            return None
        if ahead is not None:
            ahead.imported()  # before anything is timed
        turn.ask("time")
        return turn.answer()

    def _turn(self, trial: Trial) -> _Turn:
        if trial not in self._turns:
            self._starts += 1
            job = {
                "bench": "models",
                "trial": asdict(trial),
                "device": str(self._device),
                "quick": self._asked.quick,
            }
            folder = self._folder / f"{self._starts:03}"
            self._turns[trial] = _Turn(trial, job, folder=folder, asked=self._asked)
        return self._turns[trial]

    def _is_late(self) -> bool:
        limit = self._asked.seconds
        return limit is not None and time.monotonic() - self._began >= limit

    def _fail(self, trial: Trial, why: str, *, log: Sequence[str] = ()) -> None:
        self._tell(f"{trial}: {why}")
        own = trial.model not in ZOO
        if own and why.startswith("RecipeError: "):
            raise RecipeError(why.removeprefix("RecipeError: "))  # every row would say the same
        self.tried.add(trial)
        self._kept.add(trial, {"failure": why, "log": list(log)})


def _missing(trial: Trial) -> str:
    return entry_of(trial.model).missing or WAYS[trial.way].missing
