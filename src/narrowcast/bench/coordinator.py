"""Start contenders, let them compile together, measure them one at a time in turns.

As many contenders as fit on the device at once form a group. All of a group set up at the same
time, because starting Python, importing torch and compiling take minutes and one core each. Then
come rounds: A B C, A B C, … so that whatever the machine does meanwhile (clocks, heat, neighbours)
meets everyone alike. The baseline is in every group, and a ratio is always of the same rounds.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, final

from narrowcast.bench.contenders import Contender
from narrowcast.bench.measure.memory import CONTEXT_BYTES
from narrowcast.bench.process import Inbox, Worker

Tell = Callable[[str], None]
"""Takes a line about how it goes."""

INTERRUPTED = "interrupted before its turn"
NO_MEMORY = "out of memory"
"""What torch, CUDA and cuBLAS alike say then."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is measured, and how often."""

    job: Mapping[str, Any]
    """What every worker is given, beside its contender."""
    repeats: int = 5
    """Rounds."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """What a worker is asked for in each round."""
    timeout_seconds: float = 900
    """A worker that says nothing for so long is ended."""
    training_bytes: int = 0
    """What one contender takes of the device in its turn, as estimated."""
    usable_bytes: int = 0
    together: int | None = None
    """Contenders at once; none: as many as the estimate says fit."""
    at_once: int = 1
    """Contenders that are measured at the same time: more than one only where time is no matter."""
    cold: bool = True
    """Compiler caches begin empty."""


@dataclass(kw_only=True)
class Result:
    """What came of one contender."""

    contender: Contender
    failure: str = ""
    """Why there are no figures."""
    log: list[str] = field(default_factory=list)
    """The end of a failed worker's log."""
    setup: dict[str, Any] = field(default_factory=dict)
    rounds: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Group and measurement of each of its turns."""


def hold(
    contest: Contest,
    contenders: Sequence[Contender],
    *,
    baseline: Contender,
    folder: Path,
    tell: Tell,
) -> list[Result]:
    """Run the contest; whoever cannot take part gets a result that says why.

    `folder` takes logs and compiler caches. Every process that was started is over on return. A
    KeyboardInterrupt ends the contest with the rounds that everybody of the group has had; before
    the first of them there is nothing to return, and it goes on.
    """
    coordinator = _Coordinator(contest, contenders, baseline=baseline, folder=folder, tell=tell)
    try:
        coordinator.run()
    except KeyboardInterrupt:
        if not any(result.rounds for result in coordinator.results.values()):
            raise
        coordinator.give_up()
    finally:
        coordinator.end_all()
    return list(coordinator.results.values())


@final
class _Coordinator:
    def __init__(
        self,
        contest: Contest,
        contenders: Sequence[Contender],
        *,
        baseline: Contender,
        folder: Path,
        tell: Tell,
    ) -> None:
        self._contest, self._folder, self._tell = contest, folder, tell
        self._baseline = baseline
        self.results = {c.name: Result(contender=c) for c in contenders}
        first = [baseline, *(c for c in contenders if c is not baseline)]
        self._waiting = deque(first)
        self._inbox: Inbox = queue.SimpleQueue()
        self._alive: list[Worker] = []
        self._crowded: list[Contender] = []
        """Who ran out of memory beside others, and may try again in the next group."""
        self._starts: dict[str, int] = {}

    def run(self) -> None:
        """Measure group after group."""
        group = 0
        while self._waiting:
            self._gather()
            newcomers = [w for w in self._alive if group == 0 or w.contender is not self._baseline]
            for number in range(1, self._contest.repeats + 1 if newcomers else 1):
                self._whole_round(group)
                done = "; ".join(_turn_text(self.results[w.contender.name]) for w in self._alive)
                self._tell(f"round {number} of {self._contest.repeats}: {done}")
            self._end([w for w in self._alive if w.contender is not self._baseline])
            self._waiting.extend(self._crowded)
            self._crowded.clear()
            group += 1

    def give_up(self) -> None:
        """Say of those that were not measured why."""
        for result in self.results.values():
            if not result.rounds and not result.failure:
                result.failure = INTERRUPTED

    def end_all(self) -> None:
        """End every process."""
        self._end(list(self._alive))

    def _gather(self) -> None:
        """Start contenders as long as they fit, and wait until all that were are ready."""
        busy: set[Worker] = set()
        newcomers = 0
        while True:
            while self._waiting and self._has_room(busy, newcomers=newcomers):
                contender = self._waiting.popleft()
                if contender.missing:
                    self._fail(contender, contender.missing)
                    continue
                busy.add(self._start(contender))
                newcomers += contender is not self._baseline
            if not busy:
                return
            worker, answer = self._await(busy)
            if answer is None:
                busy.discard(worker)
            elif answer["event"] == "alive":
                worker.setup |= {"start_seconds": time.monotonic() - worker.began}
            else:
                busy.discard(worker)
                worker.setup |= answer
                self.results[worker.contender.name].setup = worker.setup
                self._tell(f"{worker.contender.name}: {_setup_text(worker.setup)}")

    def _has_room(self, busy: set[Worker], *, newcomers: int) -> bool:
        """Say whether one more may start beside those that are there."""
        contest = self._contest
        if not self._alive:
            return True
        if newcomers == 0 and not busy:
            return True  # or this group would be the baseline alone: rather let it be tried
        if contest.together is not None:
            return len(self._alive) < contest.together
        held = sum(
            contest.training_bytes if worker in busy else worker.setup["held_bytes"] + CONTEXT_BYTES
            for worker in self._alive
        )
        return bool(held + contest.training_bytes <= contest.usable_bytes)

    def _start(self, contender: Contender) -> Worker:
        self._tell(f"{contender.name}: starting")
        number = list(self.results).index(contender.name)
        self._starts[contender.name] = attempt = self._starts.get(contender.name, 0) + 1
        worker = Worker(
            contender,
            {**self._contest.job, "contender": contender.to_json()},
            folder=self._folder / f"{number:02}-{attempt}",
            inbox=self._inbox,
            cold=self._contest.cold,
        )
        self._alive.append(worker)
        return worker

    def _whole_round(self, group: int) -> None:
        """Give everyone a turn, or nobody: a ratio is of the same rounds."""
        had = {name: len(result.rounds) for name, result in self.results.items()}
        try:
            self._measure(group)
        except KeyboardInterrupt:
            for name, result in self.results.items():
                del result.rounds[had[name] :]
            raise

    def _measure(self, group: int) -> None:
        """Give everyone a turn."""
        turns, busy = deque(self._alive), set[Worker]()
        while turns or busy:
            while turns and len(busy) < self._contest.at_once:
                worker = turns.popleft()
                if worker in self._alive:  # it may have died while others had their turn
                    worker.ask(self._contest.request)
                    busy.add(worker)
            if not busy:
                return
            worker, answer = self._await(busy)
            if answer is not None and answer["event"] == "progress":
                self._tell(f"{worker.contender.name}: {answer['text']}")
                continue
            busy.discard(worker)
            if answer is not None:
                worker.setup |= {"held_bytes": answer.get("held_bytes", 0)}
                self.results[worker.contender.name].rounds.append((group, answer))

    def _await(self, busy: set[Worker]) -> tuple[Worker, dict[str, Any] | None]:
        """Wait for word of a busy worker; None where there will be no more of it."""
        while True:
            oldest = min(busy, key=lambda worker: worker.asked)
            limit = self._contest.timeout_seconds
            left = oldest.asked + limit - time.monotonic()
            try:
                worker, answer = self._inbox.get(timeout=max(left, 0.01))
            except queue.Empty:
                self._lose(oldest, f"no answer for {limit:g} s, so it was ended")
                return oldest, None
            if worker not in self._alive:
                continue  # ended by us; its inbox says so once more
            worker.asked = time.monotonic()
            if answer is None:
                self._lose(worker, worker.reason())
            if worker in busy:
                return worker, answer

    def _lose(self, worker: Worker, why: str) -> None:
        self._end([worker])
        name = worker.contender.name
        if self._alive and NO_MEMORY in why.lower() and self._starts[name] == 1:
            self._tell(f"{name}: out of memory beside others; it has another try later")
            self.results[name].rounds = []
            self._crowded.append(worker.contender)
            return
        self._fail(worker.contender, why, log=worker.tail())

    def _fail(self, contender: Contender, why: str, *, log: Sequence[str] = ()) -> None:
        self._tell(f"{contender.name}: {why}")
        result = self.results[contender.name]
        result.failure, result.log, result.rounds = why, list(log), []

    def _end(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._alive.remove(worker)
            worker.kill()


def _setup_text(setup: Mapping[str, Any]) -> str:
    """Say where the time before the first measurement went."""
    first = sum(setup.get("first_step_seconds", {}).values())
    parts = {
        "start": setup.get("start_seconds"),
        "build": setup.get("build_seconds"),
        "first step": first or None,
        "warm-up": setup.get("warm_up_seconds"),
    }
    told = (f"{what} {seconds:.1f} s" for what, seconds in parts.items() if seconds is not None)
    return "ready: " + ", ".join(told)


def _turn_text(result: Result) -> str:
    """Say what a contender's latest turn found, where it was timed."""
    cases = result.rounds[-1][1].get("cases", {}).values()
    medians = [f"{1000 * median(case['seconds']):.2f}" for case in cases]
    return f"{result.contender.name} {', '.join(medians)} ms" if medians else result.contender.name
