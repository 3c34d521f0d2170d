"""Where held-out examples lie, and how training examples follow one another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def characters(data: Path) -> tuple[Tensor, int]:
    """Return tiny shakespeare as indices of its characters, and how many there are."""
    raw = np.fromfile(data / "text" / "tinyshakespeare.txt", np.uint8)
    kinds, ids = np.unique(raw, return_inverse=True)
    return torch.from_numpy(ids.astype(np.int64)), len(kinds)


def epochs(
    inputs: Tensor, targets: Tensor, batch: int, generator: torch.Generator
) -> Iterator[Pair]:
    """Yield batches of one shuffled epoch after the other, the last partial one left out."""
    while True:
        order = torch.randperm(len(inputs), generator=generator)
        for first in range(0, len(inputs) - batch + 1, batch):
            at = order[first : first + batch]
            yield inputs[at], targets[at]


def held_out(count: int, *, parts: tuple[int, ...]) -> Tensor:
    """Return as many places as the parts need, the same for every seed of a run."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(20))[: sum(parts)]
