"""Runs side by side: at equal step, at equal seconds, and by the time they took to get as far."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import ConfigError
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
from narrowcast.report.phrases import count, value
from narrowcast.report.run_data import RunData
from narrowcast.runs.task_info import Metric


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything a table, a page or a script shows about some runs."""

    terms: ComparisonTerms
    groups: tuple[Group, ...]
    differing: Mapping[str, tuple[str, ...]]
    """Settings in which the groups differ, with the value of each."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
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
    """Compare the runs in `folders`.

    `target` defaults to the best value that even the worst of the runs reached.
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


def _terms(runs: Sequence[ComparedRun], metric: Metric, *, target: float | None) -> ComparisonTerms:
    best = [x for run in runs if (x := run.best(metric)) is not None]
    goal = max(best) if metric.better == "lower" else min(best)  # the worst of the best
    shared = set.intersection(*({p.step for p in run.points} for run in runs))
    return ComparisonTerms(
        metric=metric,
        units=runs[0].data.task.units,
        step=max(shared) if shared else min(run.points[-1].step for run in runs),
        seconds=min(run.points[-1].seconds for run in runs),
        target=goal if target is None else target,
    )


_LOADING = ("data.workers", "data.prefetch")
"""Settings under `data` that do not change what is read."""
_WITHOUT_EFFECT = (
    *_LOADING, "checkpoint.", "profile.", "trackers",
    "eval.every", "eval.patience", "eval.min_delta", "eval.keep_best",
)  # fmt: skip
"""Settings, or their beginnings, that change neither a step nor what is measured after it."""
_LR = ("steps", "epochs", "lr_schedule.", "optimizer.lr")
_MACHINE = ("cpu", "gpus", "cores", "torch")


def different_data(differing: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the settings by which the runs read different data; their losses do not compare."""
    return [key for key in differing if key.startswith("data.") and key not in _LOADING]


def causes(differing: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the settings that may explain a difference; precision settings count as one."""
    matches = [key for key in differing if not key.startswith(_WITHOUT_EFFECT)]
    if "steps" in matches:  # which epochs stand for
        matches = [key for key in matches if key != "epochs"]
    formats = [key for key in matches if key.startswith("precision.")]
    others = [key for key in matches if key not in formats]
    return [", ".join(formats), *others] if formats else others


def cautions(
    grouped: Sequence[Sequence[ComparedRun]], differing: Mapping[str, tuple[str, ...]], *, step: int
) -> Iterator[str]:
    """Yield where the runs do not compare as the table suggests."""
    runs = [run for members in grouped for run in members]
    data = different_data(differing)
    if data:
        yield (
            f"The runs use different data ({', '.join(data)}), so their losses cannot be "
            "compared. Only speed and skipped steps can."
        )
    several = causes(differing)
    if len(several) > 1:
        yield (
            f"The runs differ in several settings ({', '.join(several)}), so a "
            "difference may come from any of them. Compare runs that differ in one setting."
        )
    yield from _learning_rates(grouped, differing, step=step)
    differing_machine = [key for key in _MACHINE if len({_machine(run, key) for run in runs}) > 1]
    if differing_machine:
        differences = ", ".join(differing_machine)
        yield (
            f"The runs used different machines ({differences}), so times cannot be compared "
            "directly."
        )
    yield from _seeds(grouped)
    for run in runs:
        requested, done = run.data.requested_steps, run.data.steps[-1].step
        if early := run.data.ended_early:
            yield f"{run.label} ended early at step {count(done)} of {count(requested)}: {early}."
        elif done < requested:
            yield f"{run.label} has done {count(done)} of its {count(requested, 'step')}."
        if run.data.diverged:
            yield f"{run.label} has diverged and is not ranked: {run.data.diverged}."
    separate = [run.label for run in runs if (p := run.at_step(step)) and p.step != step]
    if separate:
        yield (
            f"The runs were not evaluated at the same steps. For {', '.join(separate)}, the last "
            f"value before step {count(step)} is used."
        )


def _learning_rates(
    grouped: Sequence[Sequence[ComparedRun]], differing: Mapping[str, tuple[str, ...]], *, step: int
) -> Iterator[str]:
    """Report learning rates that differ because of settings, not because of skipped steps."""
    if not any(key.startswith(_LR) for key in differing):
        return
    firsts = [members[0] for members in grouped]
    rates = {run.label: r.lr for run in firsts for r in run.data.steps if r.step == step}
    if len({value(rate) for rate in rates.values()}) > 1:
        listed = ", ".join(f"{value(rate)} in {label}" for label, rate in rates.items())
        yield f"The runs have different learning rates: at step {count(step)}, {listed}."


def _machine(run: ComparedRun, key: str) -> str:
    # A run that was continued on the same machine has it twice.
    return str(sorted({str(session.get(key)) for session in run.data.sessions}))


def _seeds(grouped: Sequence[Sequence[ComparedRun]]) -> Iterator[str]:
    if all(len({str(run.seed) for run in members}) < 2 for members in grouped):
        yield (
            "Each group has a single seed, so differences may be due to chance. Train again "
            "with seed=1, seed=2 and compare all runs."
        )
    for members in grouped:
        for seed, times in Counter(str(run.seed) for run in members).items():
            if times > 1:
                yield (
                    f"{count(times)} runs share the recipe and seed {seed}. They are averaged "
                    "and count as one."
                )
