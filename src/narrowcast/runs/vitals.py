"""What decides whether a run that has done its steps came to anything, as each record hands it on.

A run whose weights or whose last evaluation are not finite, that never applied a step, or that
skipped all of its last ones has diverged, whatever else it did.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowcast.runs.records import EvalRecord, FindingRecord, Record, StepRecord

WEIGHTS_NOT_FINITE = "weights not finite"
"""What an evaluation's finding says of weights it found so."""
TOO_MANY_SKIPPED = 10
"""Steps skipped at the end of a run with which it has diverged."""


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """How a run stands; goes into a checkpoint as plain data."""

    steps: int = 0
    applied: int = 0
    skipped_at_end: int = 0
    evaluated: int = 0
    """The step of the last evaluation."""
    headline: str = ""
    """What is wrong with its headline, the metric that runs are judged by."""
    weights: str = ""
    """Which weights it found not to be finite."""

    def after(self, record: Record, *, headline: str) -> "Vitals":
        """Return how a run that is judged by the metric `headline` stands after one more record."""
        match record:
            case StepRecord():
                return replace(
                    self,
                    steps=self.steps + 1,
                    applied=self.applied + record.applied,
                    skipped_at_end=0 if record.applied else self.skipped_at_end + 1,
                )
            case EvalRecord():
                result = record.metrics.get(headline, 0.0)
                message = (
                    "" if math.isfinite(result) else f"its last evaluated {headline} is {result}"
                )
                return replace(self, evaluated=record.step, headline=message, weights="")
            case FindingRecord(what=what, step=step, why=why):
                seen = what == WEIGHTS_NOT_FINITE and step == self.evaluated
                return replace(self, weights=why) if seen else self
            case _:
                return self

    @property
    def diverged(self) -> str:
        """Say what is wrong with a run that ends like this; nothing where nothing is."""
        lines = [self.weights, self.headline]
        if not self.applied:
            lines.append(f"none of its {self.steps} steps was applied")
        elif self.skipped_at_end >= TOO_MANY_SKIPPED:
            lines.append(f"the last {self.skipped_at_end} of its {self.steps} steps were skipped")
        return "; ".join(filter(None, lines))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def measure_vitals(records: Iterable[Record], *, headline: str) -> Vitals:
    """Return how a run stands after `records`; an evaluation comes before what it found."""
    vitals = Vitals()
    for record in records:
        vitals = vitals.after(record, headline=headline)
    return vitals
