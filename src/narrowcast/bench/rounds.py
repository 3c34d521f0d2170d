"""`bench step`: contenders compile at the same time and are timed one at a time, in turns.

Turns (A B C, A B C, …) let changes of the machine meet everyone alike. The baseline is in every
group of contenders that fit on the device, and a ratio is always of the same rounds.
"""

import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

import torch

from narrowcast.bench.contenders import Contender, select_baseline, select_contenders
from narrowcast.bench.figures import Result, result_rows
from narrowcast.bench.process import Worker, sigterm_interrupts
from narrowcast.hardware import detect_hardware
from narrowcast.runs import describe_environment
from narrowcast.workloads import load_recipe

Log = Callable[[str], None]
"""Takes a line of progress."""

INTERRUPTED = "interrupted before it was measured"
OUT_OF_MEMORY = "out of memory"
"""Part of the messages of torch, CUDA and cuBLAS."""
USABLE_SHARE = 0.85
"""Share of the free memory for all contenders; the rest is for fragmentation."""
PEAK_MARGIN = 1.25
"""Memory reserved for a contender, over the peak of the first one."""
CONTEXT_BYTES = 600 * 2**20
"""GPU memory of a process for its kernels, measured on an H200 with torch 2.11."""


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """Settings of `bench step`; None means the default of the device."""

    recipe: str
    overrides: tuple[str, ...] = ()
    peers: str | None = None
    policies: str | None = None
    baseline: str | None = None
    repeats: int = 5
    """Rounds."""
    steps: int = 10
    """Timed steps per round."""
    together: int | None = None
    """Contenders on the device at once; None for as many as fit."""
    timeout_seconds: float = 900
    """A worker without an answer for so long is ended."""
    cold: bool = True
    """Compiler caches begin empty."""
    logs: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured."""

    results: list[Result]
    baseline: Contender
    data: dict[str, Any]
    interrupted: bool
    """Whether it ended before everyone had all rounds."""


def measure_steps(request: BenchRequest, *, log: Log) -> Figures:
    """Measure the training steps of the requested contenders."""
    recipe = load_recipe(request.recipe, request.overrides).recipe
    hardware = detect_hardware(recipe.device)
    device = torch.device(hardware.device)
    contenders = select_contenders(
        peers=request.peers, policies=request.policies, device_type=device.type
    )
    baseline = select_baseline(contenders, request.baseline)
    free = hardware.memory_bytes or sys.maxsize
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    place = nullcontext(str(request.logs)) if request.logs else tempfile.TemporaryDirectory()
    with place as folder, sigterm_interrupts():
        rounds = Rounds(
            request,
            contenders,
            baseline=baseline,
            usable_bytes=int(USABLE_SHARE * free),
            folder=Path(folder),
            log=log,
        )
        results = rounds.run()
    interrupted = any(
        r.failure == INTERRUPTED or (not r.failure and len(r.rounds) < request.repeats)
        for r in results
    )
    data = {
        "bench": "step",
        "recipe": request.recipe,
        "overrides": list(request.overrides),
        "environment": describe_environment(),
        "device": hardware.name,
        "repeats": request.repeats,
        "steps_per_round": request.steps,
        "cold_caches": request.cold,
        "baseline": baseline.name,
        "interrupted": interrupted,
        "rows": [row.to_json() for row in result_rows(results, baseline=baseline)],
        "failures": [
            {"name": r.contender.name, "why": r.failure, "log": r.log} for r in results if r.failure
        ],
        "contenders": [r.contender.to_json() | {"setup": r.setup} for r in results],
    }
    return Figures(results=results, baseline=baseline, data=data, interrupted=interrupted)


@final
class Rounds:
    """The processes of a group of contenders, and the contenders of later groups."""

    def __init__(
        self,
        request: BenchRequest,
        contenders: Sequence[Contender],
        *,
        baseline: Contender,
        usable_bytes: int,
        folder: Path,
        log: Log,
    ) -> None:
        """`usable_bytes` is what all may use together; `folder` takes logs and caches."""
        self._request, self._folder, self._log = request, folder, log
        self._usable_bytes = usable_bytes
        self._step_bytes: float | None = None
        """Memory to reserve for one contender in its turn, once the first has been set up."""
        self._baseline = baseline.name
        self._waiting = deque([baseline, *(c for c in contenders if c is not baseline)])
        self._out_of_memory: list[Contender] = []
        """Contenders that ran out of memory beside others and are tried again in the next group."""
        self._attempts: dict[str, int] = {}
        self._results = {c.name: Result(contender=c) for c in contenders}
        self._workers: dict[str, Worker] = {}
        """The running processes, by contender."""

    def run(self) -> list[Result]:
        """Measure all contenders; the result of one that cannot run says why.

        A KeyboardInterrupt ends it after the last whole round, and is raised if there is none.
        """
        results = list(self._results.values())
        try:
            self._measure_groups()
        except KeyboardInterrupt:
            if not any(result.rounds for result in results):
                raise
            for result in results:
                if not result.rounds and not result.failure:
                    result.failure = INTERRUPTED
        finally:
            for worker in self._workers.values():
                worker.kill()
        return results

    def _measure_groups(self) -> None:
        group = 0
        while self._waiting:
            self._set_up_group()
            others = [name for name in self._workers if name != self._baseline]
            for number in range(1, self._request.repeats + 1 if others or group == 0 else 1):
                self._measure_round(group)
                turns = "; ".join(_turn_text(self._results[name]) for name in self._workers)
                self._log(f"round {number} of {self._request.repeats}: {turns}")
            for name in [name for name in self._workers if name != self._baseline]:
                self._workers.pop(name).kill()
            self._waiting.extend(self._out_of_memory)
            self._out_of_memory.clear()
            group += 1

    def _set_up_group(self) -> None:
        """Start contenders while they fit, and wait until all that started are ready."""
        while started := self._start_those_that_fit():
            for name in started:
                setup = self._workers[name].answer()
                if setup is None:
                    self._drop(name)
                else:
                    self._results[name].setup = setup
                    if self._step_bytes is None:
                        self._step_bytes = PEAK_MARGIN * setup["peak_bytes"] + CONTEXT_BYTES
                    self._log(f"{name}: {_setup_text(setup)}")

    def _start_those_that_fit(self) -> list[str]:
        started: list[str] = []
        while self._waiting and self._has_room(starting=len(started)):
            contender = self._waiting.popleft()
            name = contender.name
            if contender.missing:
                self._fail(name, contender.missing)
                continue
            self._log(f"{name}: starting")
            number = list(self._results).index(name)
            self._attempts[name] = attempt = self._attempts.get(name, 0) + 1
            self._workers[name] = Worker(
                {
                    "bench": "step",
                    "recipe": self._request.recipe,
                    "overrides": list(self._request.overrides),
                    "contender": contender.to_json(),
                },
                folder=self._folder / f"{number:02}-{attempt}",
                timeout_seconds=self._request.timeout_seconds,
                cold=self._request.cold,
            )
            started.append(name)
        return started

    def _has_room(self, *, starting: int) -> bool:
        if not starting and all(name == self._baseline for name in self._workers):
            return True  # a group needs a contender beside the baseline
        if self._request.together is not None:
            return len(self._workers) < self._request.together
        if self._step_bytes is None:
            return False  # the first one shows how much memory the others need
        ready = list(self._workers)[: len(self._workers) - starting]
        held = sum(self._results[name].setup["held_bytes"] + CONTEXT_BYTES for name in ready)
        return bool(held + (starting + 1) * self._step_bytes <= self._usable_bytes)

    def _measure_round(self, group: int) -> None:
        """Give everyone a turn. If interrupted, drop the round: ratios are of the same rounds."""
        before = {name: len(result.rounds) for name, result in self._results.items()}
        try:
            for name, worker in list(self._workers.items()):
                worker.request({"steps": self._request.steps})
                turn = worker.answer()
                if turn is None:
                    self._drop(name)
                else:
                    self._results[name].setup["held_bytes"] = turn["held_bytes"]
                    self._results[name].rounds.append((group, turn))
        except KeyboardInterrupt:
            for name, result in self._results.items():
                del result.rounds[before[name] :]
            raise

    def _drop(self, name: str) -> None:
        """Record why a worker gave no answer, or let it try again without the others."""
        worker = self._workers.pop(name)
        worker.kill()
        in_parallel = bool(self._workers)
        if OUT_OF_MEMORY in worker.failure.lower() and in_parallel and self._attempts[name] == 1:
            self._log(f"{name}: out of memory with others on the device, will be retried alone")
            self._results[name].rounds = []
            self._out_of_memory.append(self._results[name].contender)
            return
        self._fail(name, worker.failure, log=worker.tail())

    def _fail(self, name: str, reason: str, *, log: Sequence[str] = ()) -> None:
        self._log(f"{name}: {reason}")
        result = self._results[name]
        result.failure, result.log, result.rounds = reason, list(log), []


def _setup_text(setup: Mapping[str, Any]) -> str:
    """Return where the time before the first measurement went."""
    parts = {
        "start": setup["start_seconds"],
        "build": setup["build_seconds"],
        "first step": setup["first_step_seconds"],
        "warm-up": setup["warm_up_seconds"],
    }
    return "ready: " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())


def _turn_text(result: Result) -> str:
    """Return a contender's latest time."""
    return f"{result.contender.name} {1000 * median(result.rounds[-1][1]['seconds']):.2f} ms"
