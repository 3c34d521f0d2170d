"""Milliseconds of steps by events of the device, and the most memory they took."""

import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor


class Clock:
    """Told when a step has been queued; begins to measure once it is let, after the warm-up."""

    def __init__(self, device: str, *, warm_up: int, gated: bool) -> None:
        self._on_gpu = device != "cpu"
        self._warm_up, self._gated = warm_up, gated
        self._steps = 0
        self._marks: list[Any] = []
        self._losses: list[Tensor] = []

    def step_ended(self) -> None:
        self._steps += 1
        if self._steps == self._warm_up:
            self._wait()
        if self._steps >= self._warm_up:
            self._marks.append(self._mark())

    def loss(self, loss: Tensor) -> None:
        """Keep a loss, without waiting for it."""
        self._losses.append(loss.detach().clone())

    def result(self) -> dict[str, Any]:
        if self._on_gpu:
            torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        ms = [self._between(a, b) for a, b in pairs]
        told: dict[str, Any] = {"ms": statistics.median(ms), "all_ms": [round(m, 3) for m in ms]}
        told["losses"] = [round(float(loss), 5) for loss in self._losses]
        told["loss"] = told["losses"][-1]
        if self._on_gpu:
            # Of the whole run: a captured step allocates when it is captured, and never again.
            told["peak_bytes"] = torch.cuda.max_memory_allocated()
            told["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return told

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        if self._gated:
            # Others begin beside this one: what it does not need while it waits is theirs.
            if self._on_gpu:
                torch.cuda.empty_cache()
            print("ready", flush=True)
            sys.stdin.readline()

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, one: Any, other: Any) -> float:
        return float(one.elapsed_time(other)) if self._on_gpu else (other - one) * 1e3
