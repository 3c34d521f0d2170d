"""Runs that share everything but the seed, taken together: what they come to, and how sure."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, Literal

from narrowcast.report.compare.runs import ComparedRun, Point
from narrowcast.report.phrases import course, written
from narrowcast.runs import strict_json
from narrowcast.runs.task_info import Metric

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, and the interval that holds the true one with 95 % confidence."""

    mean: float
    half_width: float | None
    """Half of the interval; None for a single value."""
    n: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def to_json(self) -> dict[str, float | int | None]:
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n}


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """Estimate the mean that `values` are draws of: mean ± t · s / √n; None without values."""
    if not values:
        return None
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return Estimate(mean=fmean(values), half_width=None, n=n)
    half = t_quantile(n - 1) * math.sqrt(variance(values) / n)
    return Estimate(mean=fmean(values), half_width=half, n=n)


def estimate_paired_difference(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Estimate how much the first of each pair is above the second: the mean of the differences."""
    return estimate_mean([a - b for a, b in pairs])


def estimate_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate | None:
    """Estimate how much one mean is above another, by Welch's interval, never too narrow."""
    if not values or not reference:
        return None
    gap = fmean(values) - fmean(reference)
    n = min(len(values), len(reference))
    if n < 2 or not math.isfinite(gap):
        return Estimate(mean=gap, half_width=None, n=n)
    a, b = variance(values) / len(values), variance(reference) / len(reference)
    if a + b == 0:
        return Estimate(mean=gap, half_width=0.0, n=n)
    freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (len(reference) - 1))
    # Rounding can leave 1.9999999 of 2.
    half = t_quantile(max(1, math.floor(freedom + 1e-9))) * math.sqrt(a + b)
    return Estimate(mean=gap, half_width=half, n=n)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors a two-sided interval reaches, by Student's t."""
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """Return the chance of a value within ±t: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    if freedom == 1:
        return 2 * angle / math.pi
    total = term = cosine if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


MOST_IN_LABEL = 3
"""Differing settings that name a group; the rest are counted."""


@dataclass(frozen=True, kw_only=True)
class ComparisonTerms:
    """What all runs of a comparison are measured by."""

    metric: Metric
    units: str
    """What the runs count."""
    step: int
    seconds: float
    target: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that share everything but the seed, and what they come to."""

    label: str
    runs: tuple[ComparedRun, ...]
    at_step: Estimate | None
    """The metric at the step of the comparison."""
    at_seconds: Estimate | None
    """The metric at the compared seconds; None if no run was evaluated by then."""
    against: Estimate | None
    """How much `at_step` is above that of the first group; None for the first group itself."""
    seconds_to: Estimate | None
    """Seconds in steps until the target; None if no run reached it."""
    steps_to: Estimate | None
    reached: int
    """Runs that reached the target."""
    items_per_second: float
    skipped: int
    diverged: int
    """Runs that have done their steps and came to nothing."""
    peak_bytes: int

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    def to_json(self) -> dict[str, Any]:
        estimates = ("at_step", "at_seconds", "against", "seconds_to", "steps_to")
        results = {name: getattr(self, name) for name in estimates}
        return {
            "label": self.label,
            "runs": [{"folder": run.label, "seed": run.seed} for run in self.runs],
            "seeds": list(self.seeds),
            **{name: estimate and estimate.to_json() for name, estimate in results.items()},
            "reached": self.reached,
            "items_per_second": self.items_per_second,
            "skipped": self.skipped,
            "diverged": self.diverged,
            "peak_bytes": self.peak_bytes,
        }


def make_group(
    label: str,
    runs: Sequence[ComparedRun],
    *,
    first: Sequence[ComparedRun] | None,
    terms: ComparisonTerms,
) -> Group:
    """Measure runs that share everything but the seed, and set them against the `first` group."""
    steps = [record for run in runs for record in run.data.steps]
    spent = sum(record.seconds for record in steps)
    values = values_by_seed(runs, terms)
    reached = [run.reached(terms.target, terms.metric) for run in runs]
    in_time = [run.at_seconds(terms.seconds) for run in runs]
    return Group(
        label=label,
        runs=tuple(runs),
        at_step=estimate_mean(list(values.values())),
        at_seconds=estimate_mean(list(_by_seed(runs, in_time, field="value").values())),
        against=difference(values, values_by_seed(first, terms)) if first else None,
        seconds_to=estimate_mean(list(_by_seed(runs, reached, field="seconds").values())),
        steps_to=estimate_mean(list(_by_seed(runs, reached, field="step").values())),
        reached=sum(point is not None for point in reached),
        items_per_second=sum(r.items for r in steps) / spent if spent > 0 else 0.0,
        skipped=sum(not record.applied for record in steps),
        diverged=sum(bool(run.data.diverged) for run in runs),
        peak_bytes=max(record.peak_bytes for record in steps),
    )


def grouped(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Group runs that differ only in the seed, in the order they were named."""
    groups: dict[str, list[ComparedRun]] = defaultdict(list)
    for run in runs:
        groups[strict_json.dumps(dict(sorted(run.recipe.items())))].append(run)
    return list(groups.values())


def differing(groups: Sequence[Sequence[ComparedRun]]) -> dict[str, tuple[str, ...]]:
    """Return the settings in which groups differ, with the value of each."""
    recipes = [members[0].recipe for members in groups]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    result = {key: tuple(written(recipe.get(key)) for recipe in recipes) for key in keys}
    return {key: values for key, values in result.items() if len(set(values)) > 1}


def group_label(
    differing: Mapping[str, tuple[str, ...]], run: ComparedRun, *, location: int
) -> str:
    """Return the settings that set a group apart, or its recipe where nothing does."""
    if not differing:
        return f"{run.data.name} in {run.data.policy}"
    # The policy is what most comparisons are about; with a schedule, that of each phase.
    keys = sorted(differing, key=lambda key: key != "precision.policy")
    parts = [f"{key}={differing[key][location]}" for key in keys]
    if "precision.schedule" in differing:
        others = [key for key in keys if key not in ("precision.policy", "precision.schedule")]
        parts = [
            course(run.data.setting("precision.policy"), run.data.setting("precision.schedule")),
            *(f"{key}={differing[key][location]}" for key in others),
        ]
    more = f" and {len(parts) - MOST_IN_LABEL} more" if len(parts) > MOST_IN_LABEL else ""
    return ", ".join(parts[:MOST_IN_LABEL]) + more


def values_by_seed(runs: Sequence[ComparedRun], terms: ComparisonTerms) -> dict[str, float]:
    """Return the metric at the step of the comparison, by seed."""
    return _by_seed(runs, [run.at_step(terms.step) for run in runs], field="value")


def mean_curve(group: Group) -> list[tuple[int, Estimate]]:
    """Return the mean of a group at every step at which all its runs have a value."""
    points = [{p.step: p for p in run.points} for run in group.runs]
    common = sorted(set.intersection(*(set(matched) for matched in points)))
    curve = []
    for step in common:
        values = _by_seed(group.runs, [results[step] for results in points], field="value")
        if (mean := estimate_mean(list(values.values()))) is not None:
            curve.append((step, mean))
    return curve


def difference(values: Mapping[str, float], reference: Mapping[str, float]) -> Estimate | None:
    """Estimate how much values are above others, paired by seed if they have the same seeds."""
    if set(values) == set(reference):
        return estimate_paired_difference([(values[seed], reference[seed]) for seed in values])
    return estimate_difference(list(values.values()), list(reference.values()))


def _by_seed(
    runs: Sequence[ComparedRun],
    points: Sequence[Point | None],
    *,
    field: Literal["value", "seconds", "step"],
) -> dict[str, float]:
    """Return one value a seed: runs that share a seed are repetitions, and are averaged first."""
    result: dict[str, list[float]] = defaultdict(list)
    for run, point in zip(runs, points, strict=True):
        if point is not None:
            result[str(run.seed)].append(getattr(point, field))
    return {seed: fmean(values) for seed, values in result.items()}
