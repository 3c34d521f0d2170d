"""Time and memory of steps: CUDA events on a GPU, the clock on a CPU.

Nothing waits until the last step, so the host runs ahead as it does in training.
"""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

from narrowcast.hardware.profile import peak_bytes

Step = Callable[[], object]
"""Does one step; may leave work queued on the device."""


def step_seconds(step: Step, count: int, *, device: torch.device) -> list[float]:
    """Return the seconds of each of `count` steps. Synchronises before and after."""
    if device.type == "cuda":
        return _by_events(step, count, device)
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def first_step_seconds(step: Step, *, device: torch.device) -> float:
    """Return the seconds from the first call to its last kernel, compilation included."""
    synchronize(device)
    begin = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory statistics, on a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: torch.device) -> int:
    """Empty the allocator's cache, and return what this process still holds of the device."""
    if device.type != "cuda":
        return peak_bytes(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def allocation_retries() -> int:
    """Return how often the GPU had no memory to give before this process emptied its cache."""
    # The statistics are empty before there is a CUDA context.
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
