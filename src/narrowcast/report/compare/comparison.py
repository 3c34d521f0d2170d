"""Runs side by side: at equal step, at equal seconds, and by the time they took to get as far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import RecipeError
from narrowcast.report.compare.cautions import cautions
from narrowcast.report.compare.groups import Group, Terms, differing, group_of, grouped, label_of
from narrowcast.report.compare.runs import (
    Run,
    metrics_of,
    points_of,
    read_runs,
)
from narrowcast.report.run_data import RunData
from narrowcast.runs.task_info import Metric


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything a table, a page or a script says about some runs."""

    terms: Terms
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
    "95 % t-interval of the mean over seeds, mean ± t · s / √n; a difference is taken seed by seed "
    "where both have the same seeds, and by Welch's interval where not"
)


def compare(
    folders: Sequence[str], *, metric: str | None = None, target: float | None = None
) -> Comparison:
    """Compare the runs in `folders`; refuse those that cannot be.

    `metric` is the first one of their task that every run was evaluated by, or the training loss;
    `loss/NAME` is a part of the training loss. `target` is the best value that even the worst of
    the runs reached.
    """
    _refuse_repeated(folders)
    if target is not None and not math.isfinite(target):
        raise RecipeError(f"--target {target}: no run can reach it; write a finite number")
    found = read_runs(folders)
    _refuse_different_workloads(found)
    judged = _shared_metric(found, metric)
    runs = [
        Run(label=label, data=data, points=points_of(data, judged.name))
        for label, data in found.items()
    ]
    _refuse_pointless(runs, judged.name)
    terms = _terms(runs, judged, target=target)
    together = grouped(runs)
    apart = differing(together)
    groups = [
        group_of(
            label_of(apart, members[0], place=place),
            members,
            first=together[0] if place else None,
            terms=terms,
        )
        for place, members in enumerate(together)
    ]
    notes = tuple(cautions(together, apart, step=terms.step))
    return Comparison(terms=terms, groups=tuple(groups), differing=apart, notes=notes)


def _refuse_repeated(folders: Sequence[str]) -> None:
    if len({Path(folder).resolve() for folder in folders}) < max(2, len(folders)):
        raise RecipeError(
            "compare needs two or more different run folders; write "
            "`narrowcast compare runs/a runs/b`"
        )


def _refuse_different_workloads(found: Mapping[str, RunData]) -> None:
    workloads = {label: data.setting("workload", "unknown") for label, data in found.items()}
    if len(set(workloads.values())) > 1:
        told = ", ".join(f"{label} is {name}" for label, name in workloads.items())
        raise RecipeError(
            f"the runs train different things, and their metrics do not compare: {told}; "
            "name runs of one workload"
        )


def _shared_metric(found: Mapping[str, RunData], asked: str | None) -> Metric:
    first, *others = [metrics_of(data) for data in found.values()]
    # The training loss is always there, behind what was evaluated.
    shared = {name: metric for name, metric in first.items() if all(name in o for o in others)}
    if asked is None:
        return next(iter(shared.values()))
    if asked not in shared:
        named = [repr(name) if " " in name else name for name in shared]
        raise RecipeError(
            f"--metric {asked}: not every run was evaluated by it; write one of {', '.join(named)}"
        )
    return shared[asked]


def _refuse_pointless(runs: Sequence[Run], metric: str) -> None:
    lost = [run.label for run in runs if not run.points]
    if lost:
        raise RecipeError(
            f"{metric} was never finite in {', '.join(lost)}; leave it out, or name another "
            "--metric"
        )


def _common_step(runs: Sequence[Run]) -> int:
    """Return the last step that all runs have a value of, or else the last of the shortest run."""
    shared = set.intersection(*({p.step for p in run.points} for run in runs))
    return max(shared) if shared else min(run.points[-1].step for run in runs)


def _terms(runs: Sequence[Run], metric: Metric, *, target: float | None) -> Terms:
    best = [x for run in runs if (x := run.best(metric)) is not None]
    goal = max(best) if metric.better == "lower" else min(best)  # the worst of the best
    return Terms(
        metric=metric,
        units=runs[0].data.task.units,
        step=_common_step(runs),
        seconds=min(run.points[-1].seconds for run in runs),
        target=goal if target is None else target,
    )
