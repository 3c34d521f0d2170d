"""How long steps take: device events on a GPU, the clock on a CPU.

On a GPU an event is recorded between two steps and nothing is waited for until a round is over, so
the host runs ahead as it does in training. A step's time is the time between its two events: if
the device had to wait for the host, that is in it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from narrowcast.hardware.peak import peak_bytes

Step = Callable[[], object]
"""Does one step; may leave work queued on the device."""

SETTLING_STEPS = 2
"""Untimed steps at the start of each round: the allocator takes its memory back, clocks rise."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to time, and how much one step of it does."""

    open: Callable[[], Step]
    """Makes it ready, and frees it when the step is forgotten; kept small until then."""
    work: Mapping[str, float] = field(default_factory=dict)
    """Amounts a step, e.g. `tokens`, `flops`, `bytes`."""
    least_seconds: float = 0.0
    """How long a turn is at least: clocks that fell while others had theirs rise again first, for
    as long, and then so many steps are timed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a contender brings to be measured."""

    cases: Mapping[str, Case]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Plain data about what was built, for the figures."""
    loss: Callable[[], float | None] = lambda: None
    """The loss of the latest step; waits for the device."""
    is_captured: Callable[[], bool] = lambda: False
    """Whether a step is a CUDA graph by now: what that takes is only seen when it is captured."""


def step_seconds(step: Step, count: int, *, device: torch.device) -> list[float]:
    """Return the seconds of each of `count` steps. Waits for the device before and after."""
    if device.type == "cuda":
        return _by_events(step, count, device)
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def first_step_seconds(step: Step, *, device: torch.device) -> float:
    """Return the seconds from the first call to its last kernel: compilation, mostly."""
    wait(device)
    begin = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - begin


def wait(device: torch.device) -> None:
    """Wait for everything that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Begin to look for the peak of memory anew, where the device keeps one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: torch.device) -> int:
    """Give cached memory back to the device, and return what this process still holds of it."""
    if device.type != "cuda":
        return peak_bytes(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _by_events(step: Step, count: int, device: torch.device) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(events)]
