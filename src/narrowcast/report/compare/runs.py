"""One run of a comparison: its curve over steps and over seconds, and what may be asked of it."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from narrowcast.errors import CheckpointError
from narrowcast.report.charts.series import smoothing_window
from narrowcast.report.run_data import RunData, read_run

TRAINING = "training loss"
"""In the place of a metric, where the runs share no evaluated one."""
MOST_POINTS = 400

LABELS = ("seed", "name", "description")
"""Settings in which repetitions of one recipe may differ."""

_HIGHER = ("accuracy", "auc", "auroc", "f1", "r2", "correlation", "mcc", "precision", "recall")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value of the metric, and when it was reached."""

    step: int
    seconds: float
    """Spent in steps until then; evaluations and checkpoints are not counted."""
    value: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a comparison."""

    label: str
    """The folder as it was named."""
    data: RunData
    points: tuple[Point, ...]
    """Finite values of the metric, in the order of steps."""

    @property
    def seed(self) -> Any:
        """The seed of the run."""
        return self.data.setting("seed", 0)

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Every setting that decides more than which repetition this is."""
        return {
            key: entry.get("value")
            for key, entry in self.data.settings.items()
            if key not in LABELS
        }

    def at_step(self, step: int) -> Point | None:
        """Return the last point up to `step`."""
        place = bisect_right([p.step for p in self.points], step)
        return self.points[place - 1] if place else None

    def at_seconds(self, seconds: float) -> Point | None:
        """Return the last point that was reached in `seconds`."""
        place = bisect_right([p.seconds for p in self.points], seconds)
        return self.points[place - 1] if place else None

    def reached(self, target: float, *, lower: bool) -> Point | None:
        """Return the first point as good as `target`."""
        return next((p for p in self.points if _as_good(p.value, target, lower=lower)), None)

    def best(self, *, lower: bool) -> float | None:
        """Return the best value of all."""
        values = [p.value for p in self.points]
        return None if not values else min(values) if lower else max(values)


def read_runs(folders: Sequence[str]) -> dict[str, RunData]:
    """Read the runs of a comparison, or refuse one that has not begun."""
    found = {folder: read_run(Path(folder)) for folder in folders}
    empty = [folder for folder, data in found.items() if not data.steps]
    if empty:
        raise CheckpointError(
            f"{', '.join(empty)} holds no step yet, so there is nothing to compare; leave it out, "
            "or wait for the run"
        )
    return found


def lower_is_better(metric: str) -> bool:
    """Say whether a smaller value of `metric` is the better one: of all but a few names."""
    words = metric.lower().replace("-", "_").split("_")
    return not any(name in words for name in _HIGHER)


def points_of(data: RunData, metric: str) -> tuple[Point, ...]:
    """Return the values of `metric` over a run; those that are not finite are left out."""
    clock = dict(
        zip(
            (r.step for r in data.steps),
            accumulate(r.seconds if math.isfinite(r.seconds) else 0.0 for r in data.steps),
            strict=True,
        )
    )
    if metric == TRAINING:
        found = _smoothed_losses(data)
    else:
        found = [(r.step, r.metrics[metric]) for r in data.evals if metric in r.metrics]
    return tuple(
        Point(step=step, seconds=clock.get(step, 0.0), value=y)
        for step, y in found
        if math.isfinite(y)
    )


def _smoothed_losses(data: RunData) -> list[tuple[int, float]]:
    """Take the median of the last losses at evenly spaced steps; it never looks ahead."""
    steps = data.steps
    window = smoothing_window(len(steps))
    n = len(steps)
    at = sorted(
        {k * (n - 1) // max(1, min(n, MOST_POINTS) - 1) for k in range(min(n, MOST_POINTS))}
    )
    found = []
    for i in at:
        losses = [r.loss for r in steps[max(0, i + 1 - window) : i + 1] if math.isfinite(r.loss)]
        if losses:
            found.append((steps[i].step, median(losses)))
    return found


def _as_good(value: float, target: float, *, lower: bool) -> bool:
    return value <= target if lower else value >= target
