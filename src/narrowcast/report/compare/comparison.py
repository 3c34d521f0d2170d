"""Runs side by side: at equal step, at equal seconds, and by the time they took to get as far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import ConfigError
from narrowcast.report.compare.cautions import cautions
from narrowcast.report.compare.groups import (
    ComparisonTerms,
    Group,
    differing,
    group_label,
    grouped,
    make_group,
)
from narrowcast.report.compare.runs import (
    ComparedRun,
    comparable_metrics,
    metric_points,
    read_runs,
)
from narrowcast.report.run_data import RunData
from narrowcast.runs.task_info import Metric


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything a table, a page or a script says about some runs."""

    terms: ComparisonTerms
    groups: tuple[Group, ...]
    differing: Mapping[str, tuple[str, ...]]
    """Settings in which the groups differ, with the value of each."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "metric": self.terms.metric.name,
            "lower_is_better": self.terms.metric.better == "lower",
            "at_step": self.terms.step,
            "at_seconds": self.terms.seconds,
            "target": self.terms.target,
            "interval": INTERVAL,
            "groups": [group.to_json() for group in self.groups],
            "differing": {key: list(values) for key, values in self.differing.items()},
            "notes": list(self.notes),
        }


INTERVAL = (
    "95 % t-interval of the mean over seeds, mean ± t · s / √n; differences are paired by seed "
    "if both groups have the same seeds, and use Welch's interval if not"
)


def compare(
    folders: Sequence[str], *, metric: str | None = None, target: float | None = None
) -> Comparison:
    """Compare the runs in `folders`; refuse those that cannot be.

    `metric` is the first one of their task that every run was evaluated by, or the training loss;
    `loss/NAME` is a part of the training loss. `target` is the best value that even the worst of
    the runs reached.
    """
    _check_repeated(folders)
    if target is not None and not math.isfinite(target):
        raise ConfigError(f"--target must be a finite number, got {target}")
    results = read_runs(folders)
    _check_workloads(results)
    judged = _shared_metric(results, metric)
    runs = [
        ComparedRun(label=label, data=data, points=metric_points(data, judged.name))
        for label, data in results.items()
    ]
    _check_comparable(runs, judged.name)
    terms = _terms(runs, judged, target=target)
    together = grouped(runs)
    separate = differing(together)
    groups = [
        make_group(
            group_label(separate, members[0], location=location),
            members,
            first=together[0] if location else None,
            terms=terms,
        )
        for location, members in enumerate(together)
    ]
    notes = tuple(cautions(together, separate, step=terms.step))
    return Comparison(terms=terms, groups=tuple(groups), differing=separate, notes=notes)


def _check_repeated(folders: Sequence[str]) -> None:
    if len({Path(folder).resolve() for folder in folders}) < max(2, len(folders)):
        raise ConfigError(
            "compare needs two or more different run folders. Write `narrowcast compare runs/a "
            "runs/b`"
        )


def _check_workloads(result: Mapping[str, RunData]) -> None:
    workloads = {label: data.setting("workload", "unknown") for label, data in result.items()}
    if len(set(workloads.values())) > 1:
        message = ", ".join(f"{label} is {name}" for label, name in workloads.items())
        raise ConfigError(
            f"The runs have different workloads, so their metrics cannot be compared: {message}. "
            "Name runs of one workload"
        )


def _shared_metric(matched: Mapping[str, RunData], requested: str | None) -> Metric:
    first, *others = [comparable_metrics(data) for data in matched.values()]
    # The training loss is always there, behind what was evaluated.
    shared = {name: metric for name, metric in first.items() if all(name in o for o in others)}
    if requested is None:
        return next(iter(shared.values()))
    if requested not in shared:
        named = [repr(name) if " " in name else name for name in shared]
        raise ConfigError(
            f"--metric must be a metric that every run has, got {requested}. Write one of "
            f"{', '.join(named)}"
        )
    return shared[requested]


def _check_comparable(runs: Sequence[ComparedRun], metric: str) -> None:
    lost = [run.label for run in runs if not run.points]
    if lost:
        raise ConfigError(
            f"{metric} was never finite in {', '.join(lost)}. Leave that run out, or choose "
            "another --metric"
        )


def _common_step(runs: Sequence[ComparedRun]) -> int:
    """Return the last step that all runs have a value of, or else the last of the shortest run."""
    shared = set.intersection(*({p.step for p in run.points} for run in runs))
    return max(shared) if shared else min(run.points[-1].step for run in runs)


def _terms(runs: Sequence[ComparedRun], metric: Metric, *, target: float | None) -> ComparisonTerms:
    best = [x for run in runs if (x := run.best(metric)) is not None]
    goal = max(best) if metric.better == "lower" else min(best)  # the worst of the best
    return ComparisonTerms(
        metric=metric,
        units=runs[0].data.task.units,
        step=_common_step(runs),
        seconds=min(run.points[-1].seconds for run in runs),
        target=goal if target is None else target,
    )
