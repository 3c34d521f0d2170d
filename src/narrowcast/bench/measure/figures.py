"""From seconds to figures: medians, spreads, and ratios against a baseline of the same rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The middle of many timings, and how far its neighbours lie apart."""

    median: float
    low: float
    """A quarter of the timings is below it."""
    high: float
    """A quarter is above it."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of one contender in one case."""

    name: str
    case: str
    seconds: Spread
    against: str
    """Whom `speed` compares it with."""
    speed: float | None
    """The baseline's median over this one's, both of the same rounds; 2 is twice as fast."""
    peak_bytes: int
    rates: Mapping[str, float]
    """Amounts per second, by what is counted."""
    host_seconds: float | None = None
    """What the host takes to ask for a step, where it was measured apart: a median."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, times in milliseconds."""
        spread = self.seconds
        return {
            "name": self.name,
            "case": self.case,
            "median_ms": 1000 * spread.median,
            "quartiles_ms": [1000 * spread.low, 1000 * spread.high],
            "timed_steps": spread.count,
            "host_ms": None if self.host_seconds is None else 1000 * self.host_seconds,
            "against": self.against,
            "speed": self.speed,
            "peak_bytes": self.peak_bytes,
            **{f"{what}_per_second": rate for what, rate in self.rates.items()},
            **self.facts,
        }


def spread(seconds: Sequence[float]) -> Spread:
    """Return median and quartiles; between two timings it interpolates, as numpy does."""
    ordered = sorted(seconds)
    return Spread(
        median=median(ordered),
        low=_quantile(ordered, 0.25),
        high=_quantile(ordered, 0.75),
        count=len(ordered),
    )


def speed(mine: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return how many times as fast as the baseline this is, by medians; nothing without both."""
    if not mine or not baseline:
        return None
    return median(baseline) / median(mine)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
