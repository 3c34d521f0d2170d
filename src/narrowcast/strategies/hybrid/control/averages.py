"""Means over three spans at once: whether a number is falling shows in how they differ."""

from dataclasses import dataclass, replace
from typing import final

ALPHAS = (0.25, 0.0625, 0.015625)
"""How much the newest number counts: the last 4, 16 and 64."""


@final
@dataclass(frozen=True)
class MultiScaleAverage:
    """Exponential averages of one number: fast, medium, slow."""

    fast: float = 0.0
    medium: float = 0.0
    slow: float = 0.0
    count: int = 0

    def after(self, value: float) -> "MultiScaleAverage":
        """Return the averages after one more number; the first one is all of them."""
        if self.count == 0:
            return MultiScaleAverage(value, value, value, 1)
        fast, medium, slow = (
            mean + alpha * (value - mean)
            for mean, alpha in zip((self.fast, self.medium, self.slow), ALPHAS, strict=True)
        )
        return replace(self, fast=fast, medium=medium, slow=slow, count=self.count + 1)

    @property
    def spread(self) -> float:
        """Fast less slow: negative where the number falls."""
        return self.fast - self.slow

    @property
    def instability(self) -> float:
        """The spread as a share of the slow average."""
        return abs(self.spread) / max(abs(self.slow), 1e-12)
