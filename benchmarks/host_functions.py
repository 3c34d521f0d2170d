"""Where the host spends its time in a step, for the benchmarks that ask."""

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def hottest(step: Callable[[], Any], *, calls: int, count: int) -> list[str]:
    """Return the functions in which a step spends most, with what it spends in each itself.

    Those of autograd's threads too, from Python 3.12 on. Begins and ends with nothing queued.
    """
    profiler = cProfile.Profile()
    _wait()
    profiler.enable()
    for _ in range(calls):
        step()
    profiler.disable()
    _wait()
    entries: Any = pstats.Stats(profiler)
    found = sorted(entries.stats.items(), key=lambda each: -each[1][2])[:count]
    return [
        f"{Path(where).name}:{line} {name}: {called / calls:.0f} calls, {own / calls * 1e6:.0f} µs"
        for (where, line, name), (_, called, own, _, _) in found
    ]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
