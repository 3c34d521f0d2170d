"""Work on a GPU as a CUDA graph: what the device takes for it, whatever the host does."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

WARM_UP = 3
"""Calls before the capture: compilers compile, libraries take their workspaces."""


def captured(work: Callable[[], object], *, device: torch.device) -> Callable[[], None]:
    """Run some work, capture it, and return what replays it. It must leave no gradients behind."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return _Replay(graph, work)


@dataclass(frozen=True)
class _Replay:
    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]
    """Held because its tensors must live as long as the graph."""

    def __call__(self) -> None:
        self.graph.replay()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: every stream that products ran on keeps a workspace of 32 MiB, or two."""
    return torch.cuda.Stream(device)
