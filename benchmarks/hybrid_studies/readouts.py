"""Read-outs: averages of a trajectory's weights, kept beside it and never fed back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALF_LIVES = (0.005, 0.015, 0.05)
"""Of the bank, as shares of the planned steps."""
LAWA_EVERY, LAWA_KEPT = 0.025, 6
"""Checkpoints that are averaged: a share of the planned steps apart, and how many."""


class Bank:
    """Exponential averages of one trajectory with several half-lives."""

    def __init__(self, shares: Sequence[float], *, plan: int) -> None:
        self.shares = tuple(shares)
        self.news = [1 - 0.5 ** (1 / max(1.0, share * plan)) for share in shares]
        self.averages: list[Tensor] = []
        self.seen = 0

    def add(self, weights: Tensor) -> None:
        """Take one more state in; the first states are averaged evenly."""
        if not self.averages:
            self.averages = [weights.clone() for _ in self.news]
        self.seen += 1
        for average, new in zip(self.averages, self.news, strict=True):
            average.lerp_(weights, max(new, 1 / self.seen))

    def answers(self) -> dict[str, Tensor]:
        """Return the averages, by half-life."""
        return {
            f"ema{share:g}": each for share, each in zip(self.shares, self.averages, strict=True)
        }


class Lawa:
    """The mean of the latest checkpoints (2306.03241)."""

    def __init__(self, *, plan: int) -> None:
        self.every = max(1, round(LAWA_EVERY * plan))
        self.kept: list[Tensor] = []
        self.seen = 0

    def add(self, weights: Tensor) -> None:
        """Keep a checkpoint where one is due."""
        self.seen += 1
        if self.seen % self.every == 0:
            self.kept = [*self.kept[1 - LAWA_KEPT :], weights.clone()]

    def answers(self) -> dict[str, Tensor]:
        """Return the mean, once there is a checkpoint."""
        return {"lawa": torch.stack(self.kept).mean(0)} if self.kept else {}
