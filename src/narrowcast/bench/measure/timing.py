"""How long steps take: device events on a GPU, the clock on a CPU.

On a GPU an event is recorded between two steps and nothing is waited for until a round is over, so
the host runs ahead as it does in training. A step's time is the time between its two events: if
the device had to wait for the host, that is in it. What is only a part of a step has no backward
pass before it that keeps the device busy: it is queued behind a pause instead, and what the device
and what the host take are two figures.
"""

import functools
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
    """Amounts per step, e.g. `tokens`, `flops`, `bytes`."""
    least_seconds: float = 0.0
    """How long a turn is at least: clocks that fell while others had theirs rise again first, for
    as long, and then so many steps are timed."""
    part_of_step: bool = False
    """On a GPU, time device and host apart."""


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


def queued_seconds(
    step: Step, count: int, *, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return what each of `count` steps takes on a GPU with the host ahead of it, and on the host.

    The host's part is until it can go on: a step that waits for the device has the device's in it.
    """
    on_host = [_asking_seconds(step, device) for _ in range(count)]
    pause = round(2 * max(on_host) * _pause_cycles_per_second(device.index))
    on_device = [_behind_pause(step, pause, device) for _ in range(count)]
    return on_device, on_host


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


def allocation_retries() -> int:
    """Return how often the GPU had no memory to give before this process freed what it cached."""
    # There are no statistics before there is a context.
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _by_events(step: Step, count: int, device: torch.device) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(events)]


def _asking_seconds(step: Step, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _behind_pause(step: Step, cycles: int, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(cycles)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


@functools.cache
def _pause_cycles_per_second(index: int | None) -> float:
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    cycles = 20_000_000
    _behind_pause(lambda: torch.cuda._sleep(cycles), cycles, device)  # lets clocks rise
    return cycles / _behind_pause(lambda: torch.cuda._sleep(cycles), cycles, device)
