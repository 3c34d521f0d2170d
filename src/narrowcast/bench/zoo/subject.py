"""A worker's side: import, then build and warm up one model in one way, then time its steps.

The process has touched no device before it is asked to, so that the next one can start while this
one is busy with its set-up.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, final

import torch

from narrowcast.bench.measure.timing import first_step_seconds, forget_peak, step_seconds, wait
from narrowcast.bench.zoo.models import built, entry_of
from narrowcast.bench.zoo.ways import WAYS, Step, Trial, step_of
from narrowcast.hardware.peak import peak_bytes

WARM_UP_STEPS, ROUNDS, ROUND_STEPS = 5, 3, 8
"""With the first step these are thirty: the loss that is told is of the thirtieth."""


def subject(job: Mapping[str, Any]) -> "TrialSubject":
    """Return what a worker measures."""
    return TrialSubject(
        Trial(**job["trial"]), device=torch.device(job["device"]), quick=job["quick"]
    )


@final
class TrialSubject:
    """Trains one model in one way, and times it."""

    def __init__(self, trial: Trial, *, device: torch.device, quick: bool) -> None:
        self._trial, self._device, self._quick = trial, device, quick
        self._step: Step | None = None
        self._facts: dict[str, Any] = {}

    def ready(self) -> dict[str, Any]:
        """Import what takes long, and touch no device."""
        if entry_of(self._trial.model).transformers:
            importlib.import_module("transformers")
        return {}

    def measure(self, request: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        """Build and warm up, or time the steps of what was."""
        return self._set_up() if request["stage"] == "set up" else self._timed()

    def _set_up(self) -> dict[str, Any]:
        begin = time.perf_counter()
        made = built(self._trial.model, self._device, quick=self._quick)
        step, about = step_of(made, self._trial, self._device)
        wait(self._device)
        building = time.perf_counter() - begin
        first = first_step_seconds(step, device=self._device)
        for _ in range(WARM_UP_STEPS):
            step()
        wait(self._device)
        self._step = step
        self._facts = {
            "parameters": sum(p.numel() for p in made.model.parameters()),
            "build_seconds": building,
            "first_step_seconds": first,
            "version": _version(WAYS[self._trial.way].distribution),
            **about,
        }
        return {}

    def _timed(self) -> dict[str, Any]:
        assert self._step is not None
        latest: list[torch.Tensor] = []
        run = self._step

        def step() -> None:
            latest[:] = [run()]

        # What a graph takes is only seen when it is captured.
        if self._trial.mode != "graphed":
            forget_peak(self._device)
        rounds = [
            sum(step_seconds(step, ROUND_STEPS, device=self._device)) / ROUND_STEPS
            for _ in range(ROUNDS)
        ]
        return {
            "ms": 1000 * min(rounds),
            "rounds_ms": [1000 * each for each in rounds],
            "peak_bytes": peak_bytes(self._device),
            "loss": float(latest[0]),
            **self._facts,
        }


def _version(distribution: str) -> str | None:
    return version(distribution) if distribution else None
