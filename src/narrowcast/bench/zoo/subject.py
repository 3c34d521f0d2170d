"""A worker's side: import, then build and warm up one model in one way, then time its steps.

The process has touched no device before it is asked to, so that the next one can start while this
one is busy with its set-up. One that is set up beside others holds little while it waits to be
timed, and warms up again before.
"""

import gc
import importlib.util
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, final

import torch

from narrowcast.bench.measure.timing import (
    allocation_retries,
    first_step_seconds,
    forget_peak,
    held_bytes,
    step_seconds,
    wait,
)
from narrowcast.bench.zoo.models import built, entry_of
from narrowcast.bench.zoo.ways import WAYS, Step, Trial, step_of
from narrowcast.errors import UnsupportedError
from narrowcast.hardware.peak import peak_bytes

WARM_UP_STEPS, ROUNDS, ROUND_STEPS = 5, 3, 8
"""With the first step these are thirty."""
TOLD_STEP = 30
"""Whose loss is told, however many steps are taken: losses of all rows can be compared."""


def subject(job: Mapping[str, Any]) -> "TrialSubject":
    """Return what a worker measures."""
    return TrialSubject(
        Trial(**job["trial"]),
        device=torch.device(job["device"]),
        quick=job["quick"],
        together=job["together"],
        started=job["started"],
    )


@final
class TrialSubject:
    """Trains one model in one way, and times it."""

    def __init__(
        self, trial: Trial, *, device: torch.device, quick: bool, together: int, started: float
    ) -> None:
        self._trial, self._device, self._quick = trial, device, quick
        self._together, self._started = together, started
        self._steps: _Steps | None = None
        self._facts: dict[str, Any] = {}
        self._spans: dict[str, tuple[float, float]] = {}
        """When it did what, in seconds of the epoch."""

    def ready(self) -> dict[str, Any]:
        """Import what takes long, and touch no device."""
        if entry_of(self._trial.model).transformers:
            importlib.import_module("transformers")
        self._spans["importing"] = self._started, time.time()
        return {}

    def measure(self, request: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        """Build and warm up, or time the steps of what was."""
        begin = time.time()
        if request["stage"] == "set up":
            self._set_up()
            self._spans["setting_up"] = begin, time.time()
            return {}
        figures = self._timed()
        self._spans["timing"] = begin, time.time()
        return {**figures, **self._facts, "together": self._together, "spans": self._spans}

    def _set_up(self) -> None:
        begin = time.perf_counter()
        made = built(self._trial.model, self._device, quick=self._quick)
        step, about = step_of(made, self._trial, self._device)
        wait(self._device)
        building = time.perf_counter() - begin
        self._steps = _Steps(step)
        first = first_step_seconds(self._steps, device=self._device)
        self._warm_up(self._steps)
        self._facts = {
            "parameters": sum(p.numel() for p in made.model.parameters()),
            "build_seconds": building,
            "first_step_seconds": first,
            "version": _version(WAYS[self._trial.way].distribution),
            **about,
        }
        if self._together > 1:
            gc.collect()  # what a cycle holds is given back too
            self._facts["waiting_bytes"] = held_bytes(self._device)

    def _warm_up(self, steps: "_Steps") -> None:
        for _ in range(WARM_UP_STEPS):
            steps()
        wait(self._device)

    def _timed(self) -> dict[str, Any]:
        steps = self._steps
        assert steps is not None
        if self._together > 1:
            self._warm_up(steps)  # the allocator takes back what it gave while this one waited
        # What a graph takes is only seen when it is captured.
        if self._trial.mode != "graphed":
            forget_peak(self._device)
        retries = allocation_retries()
        rounds = [
            sum(step_seconds(steps, ROUND_STEPS, device=self._device)) / ROUND_STEPS
            for _ in range(ROUNDS)
        ]
        if self._together > 1 and allocation_retries() > retries:
            raise UnsupportedError(
                "what others hold leaves so little memory that timed steps waited for it"
            )
        return {
            "ms": 1000 * min(rounds),
            "rounds_ms": [1000 * each for each in rounds],
            "peak_bytes": peak_bytes(self._device),
            "loss": float(steps.told_loss()),
        }


@final
class _Steps:
    """Takes steps, counts them, and keeps the loss of the one that is told."""

    def __init__(self, step: Step) -> None:
        self._step, self._taken = step, 0
        self._told: torch.Tensor | None = None

    def __call__(self) -> None:
        loss = self._step()
        self._taken += 1
        if self._taken == TOLD_STEP:
            self._told = loss.detach().clone()  # a graph writes each loss where the one before was

    def told_loss(self) -> torch.Tensor:
        """Return the loss of the step that is told, which was taken."""
        assert self._told is not None
        return self._told


def _version(distribution: str) -> str | None:
    return version(distribution) if distribution else None
