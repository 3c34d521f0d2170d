"""A line or a parabola through the past of every weight, as far as the past itself trusts it.

All weights share the times of their snapshots, so a least-squares fit is one set of coefficients on
the movements. How much of it to believe is one number a weight tensor: the share of the last
movement that the fit to all before it would have got right.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from narrowcast.strategies.hybrid.jumps.history import WeightHistory
from narrowcast.strategies.hybrid.jumps.predictor import intervals, require

NAMES = {1: "line", 2: "quadratic"}


@final
class FittedCurve:
    """A polynomial of degree 1 or 2, least squares, with one shrinkage between 0 and 1 a tensor.

    Exact on its own kind of curve. Never waits for the device.
    """

    learns, cost = False, 1.0

    def __init__(self, degree: Literal[1, 2] = 1, *, shrinks: bool = True) -> None:
        self._degree, self._shrinks = degree, shrinks
        self.name = NAMES[degree]
        # One more than the fit itself takes: the last is left out to judge it by.
        self.needs = degree + 1 + int(shrinks)

    def predict(self, history: WeightHistory, *, ahead_steps: int) -> list[Tensor]:
        """Return the movement along the curve, times the shrinkage of each tensor."""
        require(self, history, ahead_steps=ahead_steps)
        ahead = intervals(history, ahead_steps)
        moves = len(history) - 1
        deltas = history.combine(extrapolation(moves, degree=self._degree, ahead=ahead))
        if self._shrinks:
            past = history.combine(extrapolation(moves - 1, degree=self._degree, ahead=1.0))
            torch._foreach_mul_(deltas, shares(past, history.move(moves - 1)))
        return deltas

    def observe(self, history: WeightHistory) -> None:
        """Learn nothing: all there is to know is in the history."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


def extrapolation(moves: int, *, degree: int, ahead: float) -> list[float]:
    """Return what to multiply movements by so that they sum to the fitted curve's further way.

    The curve is fitted to the ends of `moves` equal intervals, and followed from the last of them
    for `ahead` intervals.
    """
    times = torch.arange(moves + 1, dtype=torch.float64) - moves
    powers = torch.arange(degree + 1, dtype=torch.float64)
    fit = torch.linalg.pinv(times[:, None] ** powers)  # (degree + 1, points)
    way = torch.tensor([0.0, *(ahead**p for p in range(1, degree + 1))], dtype=torch.float64)
    on_points = way @ fit
    # They sum to zero, so a sum over points is one over the movements between them.
    on_moves = on_points.flip(0).cumsum(0).flip(0)[1:]
    return [float(c) for c in on_moves]


def shares(predicted: Sequence[Tensor], actual: Sequence[Tensor]) -> list[Tensor]:
    """Return the factor from 0 to 1 that brings each prediction nearest to what happened.

    It is 0 where nothing was predicted. Does not wait for the device.
    """
    pairs = zip(predicted, actual, strict=True)
    return [_share(p.flatten(), a.flatten()) for p, a in pairs]


def _share(predicted: Tensor, actual: Tensor) -> Tensor:
    square = torch.dot(predicted, predicted)
    share = (torch.dot(predicted, actual) / square).clamp(0, 1)
    return torch.where(square > 0, share, torch.zeros_like(share))
