"""Time a piece of a training step on the GPU and on the host separately.

In training, the optimizer update waits behind the backward pass, so the host is ahead of the
device. Timed alone, the device would wait for the host instead. Each call is therefore queued
behind a pause that is long enough for the host to finish.
"""

import functools
import time
from collections.abc import Callable

import torch

Step = Callable[[], object]


def queued_seconds(
    step: Step, count: int, *, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the seconds of each of `count` calls on the device and on the host.

    The host time ends when the host can continue. A step that waits for the device has the
    device time in both.
    """
    on_host = [_host_seconds(step, device) for _ in range(count)]
    pause = round(2 * max(on_host) * _pause_cycles_per_second(device.index))
    on_device = [_device_seconds(step, pause, device) for _ in range(count)]
    return on_device, on_host


def _host_seconds(step: Step, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _device_seconds(step: Step, pause_cycles: int, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(pause_cycles)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1000


@functools.cache
def _pause_cycles_per_second(index: int | None) -> float:
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    cycles = 20_000_000
    _device_seconds(lambda: torch.cuda._sleep(cycles), cycles, device)  # raises the clocks
    return cycles / _device_seconds(lambda: torch.cuda._sleep(cycles), cycles, device)
