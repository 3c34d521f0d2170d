"""How the headline of a run's evaluations has gone: its best, and how long there was no better one.

The trainer keeps it, a checkpoint holds it, and whoever shows a run makes it again from records.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowcast.runs.records import EvalRecord, Record
from narrowcast.runs.shape import LARGEST
from narrowcast.runs.task_info import Metric


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """How a run's evaluations stand; goes into a checkpoint as plain data."""

    best: float = math.nan
    """The best value so far; no number before the first that is finite."""
    best_step: int = 0
    """The step it was measured at, the first if there were several."""
    counted: float = math.nan
    """The last value that was better by enough than the one that counted before it."""
    stalled: int = 0
    """Evaluations in a row since then; one that is no finite number is no improvement."""
    evaluated: int = 0
    """The step of the last evaluation."""

    def after(self, record: Record, *, metric: Metric, min_delta: float = 0.0) -> "Improvement":
        """Return how it stands after one more record; `min_delta` or less is no improvement."""
        if not isinstance(record, EvalRecord) or metric.name not in record.metrics:
            return self
        value, step = record.metrics[metric.name], record.step
        result = replace(self, evaluated=step, stalled=self.stalled + 1)
        if not math.isfinite(value):
            return result
        if math.isnan(self.best) or metric.is_better(value, self.best):
            result = replace(result, best=value, best_step=step)
        # Small steps that add up to enough count in the end: the last that counted stays the mark.
        ahead = min_delta if metric.better == "higher" else -min_delta
        if math.isnan(self.counted) or metric.is_better(value, self.counted + ahead):
            result = replace(result, counted=value, stalled=0)
        return result

    def why_over(self, *, metric: Metric, patience: int) -> str:
        """Say why a run with so much patience ends here; nothing where it goes on. 0: it does."""
        if patience < 1 or self.stalled < patience:
            return ""
        times = "evaluation" if self.stalled == 1 else "evaluations"
        return f"{metric.name} had not improved for {self.stalled} {times}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def delta_in(setting: object) -> float:
    """Return the `eval.min_delta` that a file says; 0 where it says none."""
    fits = isinstance(setting, float) or (isinstance(setting, int) and abs(setting) < LARGEST)
    return float(setting) if fits else 0.0  # type: ignore[arg-type]  # a number, as just seen


def measure_improvement(
    records: Iterable[Record], *, metric: Metric, min_delta: float = 0.0
) -> Improvement:
    """Return how the evaluations of a run stand after `records`."""
    matched = Improvement()
    for record in records:
        matched = matched.after(record, metric=metric, min_delta=min_delta)
    return matched
