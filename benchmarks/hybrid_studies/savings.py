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
    """The mean loss of tuned cosine by budget, never rising."""

    shares: tuple[float, ...]
    losses: tuple[float, ...]

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
    sign: str = ""
    """`>` or `<` where it lies outside of the baseline's grid."""


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
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of seeds and its interval."""
    half = math.inf
    if len(values) > 1:
        spread = statistics.stdev(values) / math.sqrt(len(values))
        half = float(stats.t.ppf(0.975, len(values) - 1)) * spread
    return Estimate(mean=statistics.fmean(values), half=half)


def saving(
    cosine: Mapping[float, Sequence[float]], losses: Sequence[float], spent: Sequence[float]
) -> Estimate:
    """Return cosine's budget for the mean loss over what was spent, both in shares of N.

    Runs of one seed share their first weights and their batches, whatever the method. So the
    interval is the jackknife's: one seed at a time is left out, of the method and of the baseline.
    """

    def without(left: int | None) -> tuple[float, str]:
        seeds = [seed for seed in range(len(losses)) if seed != left]
        curve = curve_of({share: [each[seed] for seed in seeds] for share, each in cosine.items()})
        budget, sign = curve.budget(statistics.fmean(losses[seed] for seed in seeds))
        return budget / statistics.fmean(spent[seed] for seed in seeds), sign

    whole, sign = without(None)
    count = len(losses)
    if count < 2:
        return Estimate(mean=whole, half=math.inf, sign=sign)
    values = [count * whole - (count - 1) * without(seed)[0] for seed in range(count)]
    return Estimate(mean=whole, half=estimate(values).half, sign=sign)


def reached(by_share: Mapping[float, Sequence[float]], target: float) -> float | None:
    """Return the share of N at which a method's own budgets reach a loss; None outside of them."""
    curve = curve_of(by_share)
    share, sign = curve.budget(target)
    return None if sign else share
