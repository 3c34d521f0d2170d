"""What runs of several policies say of each other: final losses and time to a loss, by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from narrowcast.bench.contenders import Contender
from narrowcast.bench.coordinator import Result
from narrowcast.report.run_data import headline_of
from narrowcast.runs import Metric, TaskInfo

WINDOW_SHARE = 0.05
"""Of a run's steps, over which its loss is averaged: single batches differ more than policies."""
SMALLEST_WINDOW = 10
CURVE_POINTS = 200
"""Of a curve in the figures; each is the mean of the steps it stands for."""


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last `window` losses at each step, of fewer where there are fewer."""
    # Not by running sums: after one infinite loss they would never be finite again.
    return [fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]


def steps_to(losses: Sequence[float], target: float, *, window: int) -> int | None:
    """Return after how many steps the smoothed loss is at `target`, or None if it never is.

    The first steps do not count: a window that is not full yet is no average.
    """
    means = smoothed(losses, window)
    reached = (step for step, loss in enumerate(means, start=1) if loss <= target)
    return next((step for step in reached if step >= window), None)


def thinned(losses: Sequence[float], points: int = CURVE_POINTS) -> list[tuple[int, float]]:
    """Return at most `points` pairs: a step, and the mean loss since the pair before."""
    count = min(points, len(losses))
    edges = [round(k * len(losses) / count) for k in range(count + 1)]
    return [(end, fmean(losses[begin:end])) for begin, end in pairwise(edges)]


def quality_figures(results: Sequence[Result], baseline: Contender) -> dict[str, Any]:
    """Return a row for each policy, relative to the reference, and the curves of all runs."""
    runs = {
        r.contender.name: [_with_numbers(run) for run in r.rounds[0][1]["runs"]]
        for r in results
        if r.rounds
    }
    reference = {run["seed"]: run for run in runs.get(baseline.name, [])}
    return {
        "rows": [_row(name, told, reference) for name, told in runs.items()],
        "curves": [
            {"name": name, "seed": run["seed"], "loss": thinned(run["losses"])}
            for name, told in runs.items()
            for run in told
        ],
    }


def window_of(steps: int) -> int:
    """Return over how many steps a loss is averaged."""
    return min(steps, max(SMALLEST_WINDOW, round(WINDOW_SHARE * steps)))


def _row(
    name: str, runs: Sequence[Mapping[str, Any]], reference: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    window = window_of(len(runs[0]["losses"]))
    finals = [smoothed(run["losses"], window)[-1] for run in runs]
    metric = _headline(runs[0])
    judged = [run["metrics"][metric.name] for run in runs]
    pairs = [(run, reference[run["seed"]]) for run in runs if run["seed"] in reference]
    reached = [
        steps_to(run["losses"], smoothed(theirs["losses"], window)[-1], window=window)
        for run, theirs in pairs
    ]
    seconds = median(run["step_seconds"] for run in runs)
    steps = fmean(s for s in reached if s is not None) if None not in reached and reached else None
    return {
        "name": name,
        "seeds": [run["seed"] for run in runs],
        "metric": asdict(metric),
        "evaluated": fmean(judged),
        "evaluated_by_seed": judged,
        "evaluated_relative": _relative(pairs, metric.name),
        "train_loss": fmean(finals),
        "step_ms": 1000 * seconds,
        "steps_to_loss": steps,
        "seconds_to_loss": None if steps is None else steps * seconds,
        "steps_to_loss_by_seed": reached,
        "skipped": sum(run["skipped"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def _relative(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str
) -> float | None:
    """Return by which share a metric is above the reference's, on average over seeds."""
    both = [(run["metrics"][name], theirs["metrics"].get(name, 0.0)) for run, theirs in pairs]
    if not both or not all(theirs for _, theirs in both):
        return None  # of nothing there is no share
    return fmean(mine / theirs - 1 for mine, theirs in both)


def _with_numbers(run: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the words that stand for infinity in JSON into numbers again."""
    metrics = {name: float(value) for name, value in run["metrics"].items()}
    return {**run, "losses": [float(loss) for loss in run["losses"]], "metrics": metrics}


def _headline(run: Mapping[str, Any]) -> Metric:
    metric = headline_of(TaskInfo.from_json(run["task"]), run["metrics"])
    assert metric is not None  # a run ends with an evaluation
    return metric
