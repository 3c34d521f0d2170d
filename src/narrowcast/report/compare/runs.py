"""One run of a comparison: its curve over steps and over seconds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from narrowcast.errors import CheckpointError
from narrowcast.report.charts.series import smoothing_window
from narrowcast.report.run_data import RunData, read_run
from narrowcast.runs.task_info import Metric

TRAINING = Metric(name="training loss")
"""In the place of a metric, where the runs share no evaluated one."""
PART = "loss/"
"""Before the name of a part of the training loss, in the place of a metric."""
MOST_POINTS = 400

LABELS = ("seed", "name", "description")
"""Settings in which repetitions of one recipe may differ."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value of the metric, and when it was reached."""

    step: int
    seconds: float
    """Spent in steps until then; evaluations and checkpoints are not counted."""
    value: float


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a comparison."""

    label: str
    """The folder as the user named it."""
    data: RunData
    points: tuple[Point, ...]
    """Finite values of the metric, in the order of steps."""

    @property
    def seed(self) -> Any:
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
        return next((p for p in reversed(self.points) if p.step <= step), None)

    def at_seconds(self, seconds: float) -> Point | None:
        """Return the last point that was reached in `seconds`."""
        return next((p for p in reversed(self.points) if p.seconds <= seconds), None)

    def reached(self, target: float, metric: Metric) -> Point | None:
        """Return the first point as good as `target`."""
        return next((p for p in self.points if not metric.is_better(target, p.value)), None)

    def best(self, metric: Metric) -> float | None:
        values = [p.value for p in self.points]
        return None if not values else min(values) if metric.better == "lower" else max(values)


def read_runs(folders: Sequence[str]) -> dict[str, RunData]:
    """Read the runs of a comparison, or raise if one has not begun."""
    results = {folder: read_run(Path(folder)) for folder in folders}
    empty = [folder for folder, data in results.items() if not data.steps]
    if empty:
        raise CheckpointError(
            f"{', '.join(empty)} has no recorded step yet. Leave it out, or wait for the run"
        )
    return results


def comparable_metrics(data: RunData) -> dict[str, Metric]:
    """Return what a run can be compared by, the headline first: metrics, losses, parts of them."""
    evaluated = {name: replace(data.task.metric(name), name=name) for name in data.metrics}
    evaluated = {name: metric for name, metric in evaluated.items() if metric.ranked}
    parts = {name: Metric(name=name) for name in (f"{PART}{part}" for part in data.parts)}
    return {**evaluated, TRAINING.name: TRAINING, **parts}


def metric_points(data: RunData, metric: str) -> tuple[Point, ...]:
    """Return the values of `metric` over a run; those that are not finite are left out."""
    spent = accumulate(r.seconds if math.isfinite(r.seconds) else 0.0 for r in data.steps)
    clock = dict(zip((r.step for r in data.steps), spent, strict=True))
    if metric == TRAINING.name:
        matches = _smoothed([(r.step, r.loss) for r in data.steps])
    elif metric.startswith(PART):
        part = metric.removeprefix(PART)
        matches = _smoothed([(r.step, r.loss_parts.get(part, math.nan)) for r in data.steps])
    else:
        matches = [(r.step, r.metrics[metric]) for r in data.evals if metric in r.metrics]
    return tuple(
        Point(step=step, seconds=clock.get(step, 0.0), value=y)
        for step, y in matches
        if math.isfinite(y)
    )


def _smoothed(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Take the median of the last losses at evenly spaced steps; it never looks ahead."""
    n = len(losses)
    window = smoothing_window(n)
    at = sorted(
        {k * (n - 1) // max(1, min(n, MOST_POINTS) - 1) for k in range(min(n, MOST_POINTS))}
    )
    result = []
    for i in at:
        last = [y for _, y in losses[max(0, i + 1 - window) : i + 1] if math.isfinite(y)]
        if last:
            result.append((losses[i][0], median(last)))
    return result
