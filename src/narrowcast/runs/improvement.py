"""Progress of the headline metric: its best value, and evaluations without improvement."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowcast.runs.records import EvalRecord, Record
from narrowcast.runs.shape import LARGEST
from narrowcast.runs.task_info import Metric


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """State of a run's evaluations; plain data in a checkpoint."""

    best: float = math.nan
    """Best value so far; NaN before the first finite one."""
    best_step: int = 0
    """Step of the best value, the first one if there are several."""
    counted: float = math.nan
    """Last value that improved by more than `min_delta`."""
    stalled: int = 0
    """Evaluations since then; a nonfinite value does not count as an improvement."""
    evaluated: int = 0
    """Step of the last evaluation."""

    def after(self, record: Record, *, metric: Metric, min_delta: float = 0.0) -> "Improvement":
        """Return the state after a record; only changes above `min_delta` are improvements."""
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
        """Return why a run with this patience ends here, as text, or ""; 0 is endless patience."""
        if patience < 1 or self.stalled < patience:
            return ""
        times = "evaluation" if self.stalled == 1 else "evaluations"
        return f"{metric.name} had not improved for {self.stalled} {times}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def delta_in(setting: object) -> float:
    """Return `eval.min_delta` from plain data, or 0."""
    fits = isinstance(setting, float) or (isinstance(setting, int) and abs(setting) < LARGEST)
    return float(setting) if fits else 0.0  # type: ignore[arg-type]  # a number, as just seen


def measure_improvement(
    records: Iterable[Record], *, metric: Metric, min_delta: float = 0.0
) -> Improvement:
    """Return the state of a run's evaluations after `records`."""
    matched = Improvement()
    for record in records:
        matched = matched.after(record, metric=metric, min_delta=min_delta)
    return matched
