"""How sure a mean over seeds is: Student's t-interval, from the standard library alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, and the interval that holds the true one with 95 % confidence."""

    mean: float
    half_width: float | None
    """Half of the interval; None where one value gives no idea of the spread."""
    n: int

    @property
    def low(self) -> float | None:
        """The lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """The upper end."""
        return None if self.half_width is None else self.mean + self.half_width

    def to_json(self) -> dict[str, float | int | None]:
        """Return plain data."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n}


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """Estimate the mean that `values` are draws of: mean ± t · s / √n; None without values."""
    if not values:
        return None
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return Estimate(mean=fmean(values), half_width=None, n=n)
    half = t_quantile(n - 1) * math.sqrt(variance(values) / n)
    return Estimate(mean=fmean(values), half_width=half, n=n)


def estimate_paired_difference(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Estimate how much the first of each pair is above the second: the mean of the differences."""
    return estimate_mean([a - b for a, b in pairs])


def estimate_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate | None:
    """Estimate how much the mean of `values` is above that of `reference`, by Welch's interval.

    The degrees of freedom are rounded down, so the interval is never too narrow for it.
    """
    if not values or not reference:
        return None
    gap = fmean(values) - fmean(reference)
    n = min(len(values), len(reference))
    if n < 2 or not math.isfinite(gap):
        return Estimate(mean=gap, half_width=None, n=n)
    a, b = variance(values) / len(values), variance(reference) / len(reference)
    if a + b == 0:
        return Estimate(mean=gap, half_width=0.0, n=n)
    freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (len(reference) - 1))
    # Rounding can leave 1.9999999 of 2.
    half = t_quantile(max(1, math.floor(freedom + 1e-9))) * math.sqrt(a + b)
    return Estimate(mean=gap, half_width=half, n=n)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors a two-sided interval reaches, by Student's t."""
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """Return the chance of a value within ±t: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    if freedom == 1:
        return 2 * angle / math.pi
    total = term = cosine if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
