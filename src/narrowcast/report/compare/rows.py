"""A comparison in words: the headline, and the texts of its rows, for the table and the page."""

from typing import Any

from narrowcast.report.compare.comparison import Comparison, causes, different_data
from narrowcast.report.compare.groups import (
    Estimate,
    Group,
    difference,
    values_by_seed,
)
from narrowcast.report.compare.runs import PART, TRAINING
from narrowcast.report.phrases import count, duration, large, measured, said, size
from narrowcast.runs.task_info import Metric

NOTHING = "–"


def rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Write a row for each group: its label, its seeds, the columns of `titles`, and `best`."""
    best = _best(comparison)
    base, metric = comparison.groups[0], comparison.terms.metric
    return [_row(group, metric, base=base, best=group is best) for group in comparison.groups]


def headline(comparison: Comparison) -> str:
    """Return a sentence on which group did best, and whether that is significant."""
    terms, best = comparison.terms, _best(comparison)
    metric = metric_text(terms.metric)
    if different_data(comparison.differing):
        return f"The runs use different data, so their {metric} cannot be compared."
    first = comparison.groups[0]
    if best is None and any(group.diverged for group in comparison.groups):
        return "Every group has runs that diverged, so there is no best one."
    if best is None or best.at_step is None or first.at_step is None:
        return f"No group has a value of {metric} at step {count(terms.step)}."
    if len(comparison.groups) == 1:
        result = f"{metric} {interval(best.at_step, terms.metric)} at step {count(terms.step)}"
        return f"{best.label}: {result}, over {count(len(best.seeds), 'seed')}."
    message = f"{best.label} has the best {metric} at step {count(terms.step)}: "
    message += interval(best.at_step, terms.metric)
    if len(causes(comparison.differing)) > 1:
        message += " (the runs differ in more than one setting)"
    rivals = [group for group in comparison.groups if group is not best and group.at_step]
    own = values_by_seed(best.runs, terms)
    alike: list[str] = []
    for rival in rivals:
        gap = difference(own, values_by_seed(rival.runs, terms))
        if gap is None or gap.half_width is None:
            return f"{message}."
        if abs(gap.mean) <= gap.half_width:
            alike.append(rival.label)
    if not rivals:
        return f"{message}."
    if not alike:
        return f"{message}. The difference from every other group is statistically significant."
    return f"{message}. The difference from {' and '.join(alike)} is not statistically significant."


def metric_text(metric: Metric) -> str:
    """Return the name of the metric as a page shows it."""
    if metric.name.startswith(PART):
        return f"{said(metric.name.removeprefix(PART))} part of the training loss"
    return metric.name if metric == TRAINING else f"evaluated {said(metric.name)}"


def titles(comparison: Comparison) -> dict[str, str]:
    """Return the titles of the columns, by the fields of a row."""
    terms = comparison.terms
    return {
        "at_step": f"{metric_text(terms.metric)} at step {count(terms.step)}",
        "against": "vs. first",
        "at_seconds": f"after {duration(terms.seconds)}",
        "seconds_to": f"time to {measured(terms.metric, terms.target)}",
        "speed": f"{terms.units}/s",
        "skipped": "skipped",
        "peak": "peak memory",
    }


def interval(matched: Estimate, metric: Metric) -> str:
    """Write a mean and its interval: `1.975 ± 0.012`, or `91.2% ± 0.8%`."""
    notice = measured(metric, matched.mean)
    if matched.half_width is None:
        return notice
    in_percent = metric.text.endswith("%")
    half = measured(metric, matched.half_width) if in_percent else f"{matched.half_width:.2g}"
    return f"{notice} ± {half}"


def _time_to(group: Group) -> str:
    """Write how long the target took, and of how many runs, where some never reached it."""
    seconds, steps = group.seconds_to, group.steps_to
    if seconds is None or steps is None:
        return "not reached"
    message = duration(seconds.mean)
    if seconds.half_width is not None:
        message = f"{message} ± {duration(seconds.half_width)}"
        if seconds.mean < 60:
            message = f"{seconds.mean:.1f} ± {seconds.half_width:.1f} s"
    message += f", {count(round(steps.mean), 'step')}"
    whole = group.reached == len(group.runs)
    return message if whole else f"{message} ({group.reached} of {len(group.runs)} runs)"


def _row(group: Group, metric: Metric, *, base: Group, best: bool) -> dict[str, Any]:
    return {
        "label": f"{group.label} (diverged)" if group.diverged else group.label,
        "seeds": count(len(group.seeds)),
        "at_step": interval(group.at_step, metric) if group.at_step else NOTHING,
        "against": _against(group, base),
        "at_seconds": interval(group.at_seconds, metric) if group.at_seconds else NOTHING,
        "seconds_to": _time_to(group),
        "speed": large(group.items_per_second),
        "skipped": count(group.skipped),
        "peak": size(group.peak_bytes),
        "best": best,
    }


def _against(group: Group, base: Group) -> str:
    """Write the difference from the first group in per cent of it."""
    result, reference = group.against, base.at_step
    if result is None or reference is None or not reference.mean:
        return NOTHING
    percent = 100 / abs(reference.mean)
    # Adding zero takes the sign off a zero.
    message = f"{round(result.mean * percent, 2) + 0.0:+.2f}"
    if result.half_width is not None:
        message += f" ± {result.half_width * percent:.2f}"
    return f"{message} %".replace("-", "−")


def _best(comparison: Comparison) -> Group | None:
    matches = [g for g in comparison.groups if g.at_step is not None and not g.diverged]
    if different_data(comparison.differing):
        return None
    sign = 1 if comparison.terms.metric.better == "lower" else -1
    return min(matches, key=lambda g: sign * g.at_step.mean if g.at_step else 0.0, default=None)
