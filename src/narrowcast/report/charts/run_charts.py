"""The charts of a page, as data that plotly draws, each with a sentence that says the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.report.charts import drawing
from narrowcast.report.charts.series import (
    Mark,
    Series,
    changes,
    drawn,
    series,
    skip_marks,
    smoothed,
    smoothing_window,
    thinned,
)
from narrowcast.report.layers import named
from narrowcast.report.phrases import capital, count, measured, said, scale, value
from narrowcast.report.run_data import RunData

LOSS = "loss"
"""The metric that is drawn with the training loss; a headline of another name has its own chart."""

SMALL_POINTS = 600
"""Points in a small chart, which is about 500 pixels wide."""

MOST_UPRIGHTS = 40
"""Lines across the losses before they hide them; the marks below stay however many there are."""

TICKS: dict[str, dict[str, Any]] = {
    "lost": {"tickformat": ".3~p"},
    "lr": {"exponentformat": "e"},
}
_NOTES = {"lost": "Fraction of weights whose update was lost to rounding."}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure for plotly, and its alternative text."""

    name: str
    title: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""
    log_switch: bool = False
    """Whether a reader may switch the values to a logarithmic axis."""

    @property
    def height(self) -> int:
        """Pixels, which the page holds free before the chart is drawn."""
        return int(self.layout["height"])


def loss_chart(data: RunData) -> Chart:
    """Draw training loss and evaluations over steps, with skips, changes of format and findings."""
    whole = series([r.step for r in data.steps], [r.loss for r in data.steps])
    evals = _evaluations(data)
    marks = skip_marks(data.steps)
    window = smoothing_window(len(whole.steps))
    color = "@faint" if window > 1 else "@series"
    traces = [drawing.line(thinned(whole), name="training", color=color, width=1)]
    if window > 1:
        name = f"median of {window} steps"
        curve = smoothed(whole, window)
        traces.append(drawing.line(curve, name=name, color="@series", width=2))
    if evals.steps:
        traces.append(drawing.points(evals, name=f"evaluated {LOSS}"))
    layout = drawing.layout(whole.steps, height=400)
    tracks = _tracks(data, marks)
    if tracks:
        traces += tracks
        layout["yaxis"]["domain"] = [drawing.STRIP_ROW * len(tracks) + 0.04, 1]
        layout["yaxis2"] = drawing.strip_axis(len(tracks))
        layout["xaxis"]["anchor"] = "y2"
    switched = sorted({r.step for r in data.changes})
    if len(switched) <= MOST_UPRIGHTS:
        layout["shapes"] = drawing.uprights(switched, color="@changed")
    finite = whole.finite + evals.finite
    layout["yaxis"]["visible"] = bool(finite)
    top = frame_top(finite)
    if top is not None:
        layout["yaxis"]["range"] = [drawing.rounded(1.05 * min(finite) - 0.05 * top), top]
    return Chart(
        name="loss",
        title="Loss",
        alt=_loss_alt(whole, evals, marks) + _changes_alt(data),
        data=traces,
        layout=layout,
        note=_loss_note(whole, marks, top=top),
        log_switch=bool(finite) and min(finite) > 0,
    )


def scale_chart(data: RunData) -> Chart | None:
    """Draw the loss scale with its overflows over steps; None if it was always 1."""
    scales = [r.loss_scale for r in data.steps]
    whole = series([r.step for r in data.steps], [s if s > 0 else None for s in scales])
    if not whole.finite or all(s == 1 for s in scales):
        return None
    marks = skip_marks(data.steps)
    traces = [drawing.stairs(thinned(changes(whole)), name="loss scale", color="@series")]
    if marks:
        traces.append(drawing.overflows(drawn(marks)))
    layout = drawing.layout(whole.steps, height=260)
    layout["yaxis"].update(drawing.powers_of_two(whole.finite))
    return Chart(
        name="scale",
        title="Loss scale",
        alt=(
            f"Loss scale on a log2 axis: {scale(scales[0])} at the first step, "
            f"{scale(scales[-1])} at the last; {count(sum(m.steps for m in marks), 'step')} "
            "skipped."
        ),
        data=traces,
        layout=layout,
    )


def headline_chart(data: RunData) -> Chart | None:
    """Draw the headline metric over steps; None for the loss, which has its own chart."""
    metric = data.headline
    if metric is None or metric.name == LOSS or not data.steps:
        return None
    points = [(r.step, r.metrics[metric.name]) for r in data.evals if metric.name in r.metrics]
    curve = series([step for step, _ in points], [y for _, y in points])
    if not curve.finite:
        return None
    name = said(metric.name)
    trace = drawing.points(curve, name=name)
    trace["text"] = ["" if y is None else measured(metric, y) for y in curve.values]
    trace["hovertemplate"] = f"{trace['name']}: %{{text}}<extra></extra>"
    layout = drawing.layout([r.step for r in data.steps], height=260)
    layout["showlegend"] = False
    if metric.text.endswith("%"):
        layout["yaxis"]["tickformat"] = drawing.PERCENT
    course = measured(metric, curve.finite[-1])
    if len(curve.finite) > 1:
        course = f"{measured(metric, curve.finite[0])} at the start, {course} at the end"
    return Chart(
        name="headline",
        title=f"Evaluated {name}",
        alt=f"{capital(name)}, evaluated {count(len(points), 'time')}: {course}; "
        f"{metric.better} is better.",
        data=[trace],
        layout=layout,
        note=f"{capital(metric.better)} is better.",
    )


def parts_chart(data: RunData) -> Chart | None:
    """Draw each part of the loss over steps; None if the loss has no parts."""
    curves = {name: curve for name in data.parts if (curve := _part_curve(data, name)).finite}
    if not curves:
        return None
    window = smoothing_window(len(data.steps))
    traces = [
        drawing.one_of_many(smoothed(curve, window), name=said(name), index=place, width=1.75)
        for place, (name, curve) in enumerate(curves.items())
    ]
    labels = [
        f"{said(name)} {value(curve.finite[0])} at the start, {value(curve.finite[-1])} at the end"
        for name, curve in curves.items()
    ]
    lowest = min(min(curve.finite) for curve in curves.values())
    layout = drawing.layout([r.step for r in data.steps], height=300)
    layout["showlegend"] = True
    return Chart(
        name="parts",
        title="Loss parts",
        alt=f"Loss parts over {count(len(data.steps), 'step')}: {'; '.join(labels)}.",
        data=traces,
        layout=layout,
        note=f"Each line is the median of {window} steps." if window > 1 else "",
        log_switch=lowest > 0,
    )


def small_charts(data: RunData) -> list[Chart]:
    """Draw what is worth a glance: gradient norm, learning rate, lost updates, speed."""
    span = [r.step for r in data.steps]
    # Most steps do not measure lost updates; a gap between two that do would hide both.
    metered = [r for r in data.steps if r.lost_updates is not None]
    speeds = [r.items / r.seconds if r.seconds > 0 else None for r in data.steps]
    wanted = [
        ("norm", "Gradient norm", series(span, [r.grad_norm for r in data.steps])),
        ("lr", "Learning rate", series(span, [r.lr for r in data.steps])),
        (
            "lost",
            "Lost updates",
            series([r.step for r in metered], [r.lost_updates for r in metered]),
        ),
        ("speed", f"{capital(data.task.units)} per second", series(span, speeds)),
    ]
    return [_small(name, title, whole, span=span) for name, title, whole in wanted if whole.finite]


def _part_curve(data: RunData, name: str) -> Series:
    """Return one part over steps; a step that did not record it is a gap."""
    return series([r.step for r in data.steps], [r.loss_parts.get(name) for r in data.steps])


def _small(name: str, title: str, whole: Series, *, span: Sequence[int]) -> Chart:
    low, high = min(whole.finite), max(whole.finite)
    layout = drawing.layout(span, height=200)
    layout["showlegend"] = False
    # More than two decades would press most norms onto the axis.
    if name == "norm" and low > 0 and high / low > 100:
        layout["yaxis"].update(type="log", dtick=max(1, round(math.log10(high / low) / 4)))
    else:
        layout["yaxis"]["rangemode"] = "tozero"
    layout["yaxis"].update(TICKS.get(name, {}))
    few = thinned(whole, SMALL_POINTS)
    return Chart(
        name=name,
        title=title,
        alt=f"{title} over steps: between {value(low)} and {value(high)}, "
        f"{value(whole.finite[-1])} at the end.",
        data=[drawing.line(few, name=title.lower(), color="@series", width=1.25)],
        layout=layout,
        note=_NOTES.get(name, ""),
    )


def _tracks(data: RunData, marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """Make a row of marks each for skips, changes of format and findings, where there are any."""
    tracks = [drawing.strip(drawn(marks), row=0)] if marks else []
    changed: dict[int, list[str]] = {}
    for change in data.changes:
        what = f"{named(change.module)} {change.before} → {change.after}, {change.reason}"
        changed.setdefault(change.step, []).append(what)
    points: dict[int, list[str]] = {}
    for finding in data.findings:
        where = f"{finding.module}: " if finding.module else ""
        points.setdefault(finding.step, []).append(f"{where}{finding.what}")
    for name, labels, symbol, color in (
        ("format changed", changed, "diamond", "@changed"),
        ("finding", points, "triangle-up", "@points"),
    ):
        if labels:
            row = len(tracks)
            tracks.append(drawing.events(name, labels, row=row, symbol=symbol, color=color))
    return tracks


def _evaluations(data: RunData) -> Series:
    """Return the loss on held-out data: of all metrics, what the training loss compares with."""
    points = [(r.step, r.metrics[LOSS]) for r in data.evals if LOSS in r.metrics]
    return series([step for step, _ in points], [y for _, y in points])


def frame_top(finite: Sequence[float]) -> float | None:
    """Return where to cut the frame above a spike, ten times as far up as 98 % of the values."""
    if len(finite) < 50:
        return None
    ordered = sorted(finite)
    low, usual = ordered[0], ordered[len(ordered) * 98 // 100]
    limit = low + 10 * (usual - low)
    if ordered[-1] <= limit or usual == low:
        return None
    tallest = max(y for y in finite if y <= limit)
    return drawing.rounded(tallest + 0.05 * (tallest - low))


def _loss_note(whole: Series, marks: Sequence[Mark], *, top: float | None) -> str:
    notes = []
    lost = len(whole.values) - len(whole.finite)
    if lost:
        notes.append(
            f"The loss was not finite in {count(lost, 'step')}, shown as gaps in the line."
        )
    if top is not None:
        above = sum(y > top for y in whole.finite)
        notes.append(f"{count(above, 'step')} above the frame. Double-click to show all.")
    if len(drawn(marks)) < len(marks):
        notes.append("Skipped steps that are close together share one mark.")
    return " ".join(notes)


def _changes_alt(data: RunData) -> str:
    if not data.changes:
        return ""
    first = count(data.changes[0].step)
    return f" {count(len(data.changes), 'format change')}, the first at step {first}."


def _loss_alt(whole: Series, evals: Series, marks: Sequence[Mark]) -> str:
    parts = []
    if whole.finite:
        parts.append(
            f"Training loss over {count(len(whole.steps), 'step')}: {value(whole.finite[0])} at "
            f"the start, {value(whole.finite[-1])} at the end"
        )
    lost = len(whole.values) - len(whole.finite)
    if lost:
        parts.append(f"not finite in {count(lost, 'step')}")
    if evals.finite:
        times = count(len(evals.steps), "time")
        parts.append(f"evaluated {times}, {value(evals.finite[-1])} at the end")
    return "; ".join([*parts, f"{count(sum(m.steps for m in marks), 'step')} skipped"]) + "."
