"""A worker's side of `bench models`: builds and warms up one row, then times its steps."""

import gc
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, final

import torch

from narrowcast.bench.timing import (
    allocation_retries,
    first_step_seconds,
    held_bytes,
    reset_peak,
    step_seconds,
    synchronize,
)
from narrowcast.bench.zoo.models import build_model
from narrowcast.bench.zoo.ways import WAYS, ZooTrial, make_step
from narrowcast.errors import UnsupportedError
from narrowcast.hardware.profile import peak_bytes

WARM_UP_STEPS, ROUNDS, ROUND_STEPS = 5, 3, 8
REPORTED_STEP = 1 + WARM_UP_STEPS + ROUNDS * ROUND_STEPS
"""Step whose loss is reported, however many are taken, so that losses of rows are comparable."""


def subject(job: Mapping[str, Any]) -> "ZooSubject":
    """Return what a worker measures."""
    return ZooSubject(
        ZooTrial(**job["trial"]),
        device=torch.device(job["device"]),
        quick=job["quick"],
        together=job["together"],
    )


@final
class ZooSubject:
    """Trains one model in one way, and times it."""

    def __init__(
        self, trial: ZooTrial, *, device: torch.device, quick: bool, together: int
    ) -> None:
        self._trial, self._device, self._quick = trial, device, quick
        self._together = together
        self._taken = 0
        self._loss: torch.Tensor | None = None
        self._facts: dict[str, Any] = {}
        self._set_up_span: tuple[float, float] | None = None

    def ready(self) -> dict[str, Any]:
        """Build the step and take the first ones, which compile."""
        begin = time.time()
        built = build_model(self._trial.model, self._device, quick=self._quick)
        self._train, about = make_step(built, self._trial, self._device)
        synchronize(self._device)
        building = time.time() - begin
        first = first_step_seconds(self._step, device=self._device)
        self._warm_up()
        distribution = WAYS[self._trial.way].distribution
        self._facts = {
            "parameters": sum(p.numel() for p in built.model.parameters()),
            "build_seconds": building,
            "first_step_seconds": first,
            "version": version(distribution) if distribution else None,
            "together": self._together,
            **about,
        }
        if self._together > 1:
            gc.collect()  # so that memory held by reference cycles is given back too
            self._facts["waiting_bytes"] = held_bytes(self._device)
        self._set_up_span = begin, time.time()
        return {}

    def measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        begin = time.time()
        if self._together > 1:
            self._warm_up()  # the allocator takes back what it gave while this row waited
        # The memory of a graph shows only during capture.
        if self._trial.mode != "graphed":
            reset_peak(self._device)
        retries = allocation_retries()
        rounds = [
            sum(step_seconds(self._step, ROUND_STEPS, device=self._device)) / ROUND_STEPS
            for _ in range(ROUNDS)
        ]
        if self._together > 1 and allocation_retries() > retries:
            raise UnsupportedError("timed steps waited for memory held by other rows")
        assert self._loss is not None
        return {
            "ms": 1000 * min(rounds),
            "rounds_ms": [1000 * seconds for seconds in rounds],
            "peak_bytes": peak_bytes(self._device),
            "loss": float(self._loss),
            **self._facts,
            "spans": {"setting_up": self._set_up_span, "timing": (begin, time.time())},
        }

    def _step(self) -> None:
        loss = self._train()
        self._taken += 1
        if self._taken == REPORTED_STEP:
            self._loss = loss.detach().clone()  # a graph overwrites its loss

    def _warm_up(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self._step()
        synchronize(self._device)
