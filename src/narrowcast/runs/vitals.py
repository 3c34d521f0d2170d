"""Whether a finished run has diverged, computed record by record."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowcast.runs.records import EvalRecord, FindingRecord, Record, StepRecord

WEIGHTS_NOT_FINITE = "weights not finite"
"""The finding of an evaluation with such weights."""
TOO_MANY_SKIPPED = 10
"""Skipped steps at the end of a run that make it diverged."""


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """State of a run; plain data in a checkpoint."""

    steps: int = 0
    applied: int = 0
    skipped_at_end: int = 0
    evaluated: int = 0
    """Step of the last evaluation."""
    headline: str = ""
    """What is wrong with the headline metric, or empty."""
    weights: str = ""
    """Which weights are not finite, or empty."""

    def after(self, record: Record, *, headline: str) -> "Vitals":
        """Return the state after a record; `headline` is the name of the metric."""
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
        """Why a run that ends like this has diverged, or empty."""
        lines = [self.weights, self.headline]
        if not self.applied:
            lines.append(f"none of its {self.steps} steps was applied")
        elif self.skipped_at_end >= TOO_MANY_SKIPPED:
            lines.append(f"the last {self.skipped_at_end} of its {self.steps} steps were skipped")
        return "; ".join(filter(None, lines))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_vitals(records: Iterable[Record], *, headline: str) -> Vitals:
    """Return the state after `records`; an evaluation comes before its findings."""
    vitals = Vitals()
    for record in records:
        vitals = vitals.after(record, headline=headline)
    return vitals
