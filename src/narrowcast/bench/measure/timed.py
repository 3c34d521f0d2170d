"""A subject whose steps are timed: all benches but the one that trains."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, final

import torch

from narrowcast.bench.contenders import Contender
from narrowcast.bench.measure.timing import (
    SETTLING_STEPS,
    Case,
    Step,
    Trial,
    first_step_seconds,
    forget_peak,
    held_bytes,
    queued_seconds,
    step_seconds,
)
from narrowcast.hardware.peak import peak_bytes

WARM_UP_STEPS = 3
"""After the first: a compiler may compile once more at the second, and clocks need a moment."""
TRIED_STEPS = 5
"""Timed to see how many steps make a turn, where that is to last."""


@final
class TimedSubject:
    """Times the cases of a trial, one after the other."""

    def __init__(
        self, build: Callable[[], Trial], *, device: torch.device, contender: Contender
    ) -> None:
        self._build, self._device, self._contender = build, device, contender
        self._trial = Trial(cases={})

    def ready(self) -> dict[str, Any]:
        """Build the trial, and bring every case past its compilation."""
        begin = time.perf_counter()
        self._trial = self._build()
        built = time.perf_counter()
        first = {name: self._warm_up(case) for name, case in self._trial.cases.items()}
        return {
            "build_seconds": built - begin,
            "first_step_seconds": first,
            "warm_up_seconds": time.perf_counter() - built - sum(first.values()),
            "held_bytes": held_bytes(self._device),
            "version": _version(self._contender.distribution),
            **self._trial.about,
        }

    def measure(self, request: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        """Time `steps` steps of every case."""
        cases = {name: self._time(case, request) for name, case in self._trial.cases.items()}
        loss = self._trial.loss()
        return {"cases": cases, "loss": loss, "held_bytes": held_bytes(self._device)}

    def _warm_up(self, case: Case) -> float:
        begin = time.perf_counter()
        step = case.open()
        opened = time.perf_counter() - begin  # a step that is captured is compiled by now
        seconds = opened + first_step_seconds(step, device=self._device)
        _repeat(step, WARM_UP_STEPS)
        return seconds

    def _time(self, case: Case, request: Mapping[str, Any]) -> dict[str, Any]:
        step = case.open()
        _repeat(step, SETTLING_STEPS)
        count: int = request["steps"]
        if case.least_seconds:
            one = statistics.median(step_seconds(step, TRIED_STEPS, device=self._device))
            count = max(count, math.ceil(case.least_seconds / one))
            _repeat(step, count)
        if not self._trial.is_captured():
            forget_peak(self._device)
        on_host: list[float] = []
        if case.part_of_step and self._device.type == "cuda":
            seconds, on_host = queued_seconds(step, count, device=self._device)
        else:
            seconds = step_seconds(step, count, device=self._device)
        return {
            "seconds": seconds,
            "host_seconds": on_host,
            "peak_bytes": peak_bytes(self._device),
            "work": dict(case.work),
        }


def _repeat(step: Step, count: int) -> None:
    for _ in range(count):
        step()


def _version(distribution: str) -> str | None:
    """Return the version of a peer; ours and torch's are in the environment."""
    if not distribution:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
