"""The lost-update meter: the share of weights whose update rounded to nothing.

A weight had an update when its gradient was not zero; the update was lost when every tensor that
holds the weight is afterwards what it was before. Looked at on an even sample of each weight, so
that the meter costs little on models of any size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLE = 16384
"""Elements looked at per tensor: the share is then known to about one part in a hundred."""


class LostUpdates:
    """One measurement, begun before an optimizer step and ended after it."""

    def __init__(self, stored: Sequence[tuple[Tensor, ...]], gradients: Sequence[Tensor]) -> None:
        self._stored = stored
        self._before = [tuple(_sample(t).clone() for t in tensors) for tensors in stored]
        self._moving = [_sample(gradient) != 0 for gradient in gradients]

    def share(self) -> Tensor:
        """Return lost over due, on the device; 0 where nothing was due."""
        return share_lost(self.counts())

    def counts(self) -> Tensor:
        """Return how many updates were lost, and how many were due, of those looked at."""
        lost, due = [], []
        for tensors, before, moving in zip(self._stored, self._before, self._moving, strict=True):
            same = moving
            for now, then in zip(tensors, before, strict=True):
                same = same & (_sample(now) == then)
            lost.append(same.sum())
            due.append(moving.sum())
        return torch.stack([torch.stack(lost).sum(), torch.stack(due).sum()])


def share_lost(counts: Tensor) -> Tensor:
    """Return lost over due updates, from how many there are of both; 0 where none was due."""
    return counts[0] / counts[1].clamp(min=1)


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // SAMPLE)
    # A stride that divides a row would look at the same few columns of every row.
    while math.gcd(stride, flat.numel()) > 1:
        stride -= 1
    return flat[::stride]
