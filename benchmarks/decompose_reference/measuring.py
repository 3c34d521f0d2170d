"""How long steps of both sides take, and how much memory."""

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from decompose_reference.cases import Case

QUIET = ("eval.every=0", "health.every=0", "decomposition.warmup_steps=0", "eval_tasks.pgd_steps=0")
"""What is no part of a step."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Steps of one side."""

    rate: float
    """Steps in a second."""
    peak_bytes: int
    steps: int

    def told(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "steps_per_second": round(self.rate, 3),
            "peak_bytes": self.peak_bytes,
            "steps": self.steps,
        }


def reference(case: Case, *, device: torch.device, steps: int, warm: int) -> Measured:
    """Time steps of the reference, after some that are not counted."""
    _free(device)
    run, batches = case.run(device), case.batches(device)
    for _ in range(warm):
        run.step(next(batches))
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        run.step(next(batches))
    _wait(device)
    seconds = time.perf_counter() - began
    return Measured(rate=steps / seconds, peak_bytes=_peak(device), steps=steps)


def ours(
    case: Case,
    *,
    device: torch.device,
    steps: int,
    warm: int,
    seeds: int = 1,
    words: tuple[str, ...] = (),
) -> Measured:
    """Time steps of a run, from the record of one to the record of another.

    A record comes some steps after its own was queued, always as many: what lies between two is
    the time of the steps between. Nothing is kept, and nothing is judged at the end.
    """
    import narrowcast as nc
    from narrowcast.runs import StepRecord

    _free(device)
    last = warm + steps
    more = (f"steps={last}", f"device={device}", f"decomposition.seeds={seeds}", *QUIET)
    began = ended = 0.0
    for record in nc.train(case.recipe, [*case.words, *more, *words]):
        if not isinstance(record, StepRecord):
            continue
        if record.step == warm:
            began = time.perf_counter()
        if record.step == last:
            ended = time.perf_counter()
            break
    return Measured(rate=steps / (ended - began), peak_bytes=_peak(device), steps=steps)


def median(found: list[Measured]) -> Measured:
    """Return the one in the middle by speed."""
    return sorted(found, key=lambda each: each.rate)[len(found) // 2]


def spread(found: list[Measured]) -> float:
    """Return how far the fastest is from the slowest, as a share of the median."""
    rates = [each.rate for each in found]
    return (max(rates) - min(rates)) / statistics.median(rates)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
