"""Work on a GPU as a CUDA graph: what the device takes for it, whatever the host does."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

WARM_UP = 3
"""Calls before the capture: compilers compile, libraries take their workspaces."""


def captured(work: Callable[[], object], *, device: torch.device) -> Callable[[], None]:
    """Run some work, capture it, and return what replays it. It must leave no gradients behind."""
    with on_capture_stream(device):
        for _ in range(WARM_UP):
            work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(device)):
        work()
    return _Replay(graph, work)


@dataclass(frozen=True)
class _Replay:
    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]
    """Held because its tensors must live as long as the graph."""

    def __call__(self) -> None:
        self.graph.replay()


_rehearsing = threading.local()


@contextlib.contextmanager
def as_if_captured() -> Iterator[None]:
    """Make torch report a CUDA graph capture inside the block, in this thread.

    Libraries such as transformers then avoid synchronisations. `torch.cuda.graphs` still reports
    the truth.
    """
    theirs, before = torch.cuda.is_current_stream_capturing, getattr(_rehearsing, "on", False)

    def is_capturing() -> bool:
        return getattr(_rehearsing, "on", False) or theirs()

    _rehearsing.on = True
    torch.cuda.is_current_stream_capturing = is_capturing
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = theirs
        _rehearsing.on = before


@contextlib.contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    """Launch on the stream of captures inside the block; it and the current one wait in turn."""
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # what was launched before an error runs on, too
        torch.cuda.current_stream(device).wait_stream(stream)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures of a process: cuBLAS keeps memory for each it has met."""
    return torch.cuda.Stream(device)
