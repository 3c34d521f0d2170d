"""Savings: which budget of tuned cosine a loss is worth, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss of tuned cosine by budget, never rising, and how much each seed is off it."""

    shares: tuple[float, ...]
    losses: tuple[float, ...]
    offsets: tuple[float, ...]
    """Of each seed, the mean over budgets of its loss less that of all seeds."""

    def budget(self, loss: float) -> tuple[float, str]:
        """Return the share of N at which cosine has this loss, linear in its logarithm.

        The sign says where it lies outside of the grid, which is never left: then the share is the
        grid's end, and the truth is beyond it.
        """
        if loss < self.losses[-1]:
            return self.shares[-1], ">"
        if loss > self.losses[0]:
            return self.shares[0], "<"
        # Where the curve is flat, the smallest budget: the saving is not flattered.
        at = next(place for place, each in enumerate(self.losses) if each <= loss)
        if at == 0:
            return self.shares[0], ""
        high, low = self.losses[at - 1], self.losses[at]
        part = (high - loss) / (high - low)
        logs = math.log(self.shares[at - 1]), math.log(self.shares[at])
        return math.exp(logs[0] + part * (logs[1] - logs[0])), ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds with half the width of its 95 % t-interval."""

    mean: float
    half: float
    least: float
    sign: str = ""
    """`>` or `<` where seeds lie outside of the baseline's grid."""

    def __str__(self) -> str:
        return f"{self.sign}{self.mean:.2f} ± {self.half:.2f}"


def curve_of(losses: Mapping[float, Sequence[float]]) -> Curve:
    """Return the curve of losses by budget and seed, made monotone by pooling neighbours."""
    shares = sorted(losses)
    table = np.array([losses[share] for share in shares])  # (budgets, seeds)
    means = table.mean(1)
    blocks: list[list[float]] = []
    for mean in means:
        blocks.append([mean, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (left, few), (right, more) = blocks[-2:]
            blocks[-2:] = [[(left * few + right * more) / (few + more), few + more]]
    pooled = [mean for mean, count in blocks for _ in range(int(count))]
    return Curve(
        shares=tuple(shares),
        losses=tuple(float(each) for each in pooled),
        offsets=tuple((table - means[:, None]).mean(0).tolist()),
    )


def estimate(values: Sequence[float], *, sign: str = "") -> Estimate:
    """Return the mean of seeds and its interval."""
    mean = statistics.fmean(values)
    half = math.inf
    if len(values) > 1:
        spread = statistics.stdev(values) / math.sqrt(len(values))
        half = float(stats.t.ppf(0.975, len(values) - 1)) * spread
    return Estimate(mean=mean, half=half, least=min(values), sign=sign)


def saving(curve: Curve, losses: Sequence[float], spent: Sequence[float]) -> Estimate:
    """Return cosine's budget over what was spent (in shares of N), seed by seed."""
    found, signs = [], set()
    for loss, offset, cost in zip(losses, curve.offsets, spent, strict=True):
        budget, sign = curve.budget(loss - offset)
        found.append(budget / cost)
        signs.add(sign)
    sign = "".join(sorted(signs - {""}))
    return estimate(found, sign=sign)


def reached(by_share: Mapping[float, Sequence[float]], target: float) -> float | None:
    """Return the share of N at which a method's own budgets reach a loss; None outside of them."""
    curve = curve_of(by_share)
    share, sign = curve.budget(target)
    return None if sign else share
