"""Work on a GPU as a CUDA graph: what the device takes for it, whatever the host does."""

from collections.abc import Callable
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

    def replay(of: Callable[[], object] = work) -> None:  # whose tensors live as long as the graph
        graph.replay()

    return replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: every stream that products ran on keeps a workspace of 32 MiB, or two."""
    return torch.cuda.Stream(device)
