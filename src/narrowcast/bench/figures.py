"""From the answers of workers to rows of a table: medians, quartiles, speed against a baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from narrowcast.bench.contenders import Contender

SETUP_FACTS = (
    "start_seconds",
    "build_seconds",
    "warm_up_seconds",
    "first_step_seconds",
    "version",
    "parameters",
)
"""Facts of a contender's setup that are in its row; `contenders` in the JSON has all of them."""


@dataclass(kw_only=True)
class Result:
    """Measurements of one contender."""

    contender: Contender
    failure: str = ""
    """Reason for missing measurements."""
    log: list[str] = field(default_factory=list)
    """The end of a failed worker's log."""
    setup: dict[str, Any] = field(default_factory=dict)
    rounds: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Group and measurement of each turn."""

    def seconds(self, *, groups: set[int] | None = None) -> list[float]:
        """Return the seconds of all timed steps, or of those in some groups."""
        return [
            seconds
            for group, turn in self.rounds
            if groups is None or group in groups
            for seconds in turn["seconds"]
        ]


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Figures of one contender."""

    name: str
    median_seconds: float
    quartiles: tuple[float, float]
    """Seconds below which a quarter and three quarters of the steps are."""
    timed_steps: int
    against: str
    """Name of the baseline."""
    speed: float | None
    """The baseline's median over this one's, from the same groups; 2 is twice as fast."""
    peak_bytes: int
    rates: Mapping[str, float]
    """Items per second, by unit."""
    facts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, times in milliseconds."""
        return {
            "name": self.name,
            "median_ms": 1000 * self.median_seconds,
            "quartiles_ms": [1000 * seconds for seconds in self.quartiles],
            "timed_steps": self.timed_steps,
            "against": self.against,
            "speed": self.speed,
            "peak_bytes": self.peak_bytes,
            **{f"{unit}_per_second": rate for unit, rate in self.rates.items()},
            **self.facts,
        }


def result_rows(results: Sequence[Result], *, baseline: Contender) -> list[BenchRow]:
    """Return a row for each contender that was measured."""
    reference = next((r for r in results if r.contender.name == baseline.name), None)
    return [_row(result, reference) for result in results if result.rounds]


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile; between two values it interpolates, as numpy does."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _row(result: Result, reference: Result | None) -> BenchRow:
    mine = result.seconds()
    groups = {group for group, _ in result.rounds}
    theirs = reference.seconds(groups=groups) if reference else []
    last = result.rounds[-1][1]
    facts = {name: result.setup[name] for name in SETUP_FACTS if name in result.setup}
    return BenchRow(
        name=result.contender.name,
        median_seconds=median(mine),
        quartiles=(quantile(mine, 0.25), quantile(mine, 0.75)),
        timed_steps=len(mine),
        against=reference.contender.name if reference else "",
        speed=median(theirs) / median(mine) if theirs else None,
        peak_bytes=max(turn["peak_bytes"] for _, turn in result.rounds),
        rates={unit: amount / median(mine) for unit, amount in last["work"].items()},
        facts={**facts, "loss": last["loss"], "note": result.contender.note},
    )
