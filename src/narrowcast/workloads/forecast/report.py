"""The sections of a forecast report, drawn from `forecast.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from narrowcast.runs import Record, ReportSection
from narrowcast.runs.report_drawing import (
    INK,
    LINE,
    Scale,
    axes,
    box,
    colour,
    drawing,
    legend,
    line,
    path,
    text_mark,
)
from narrowcast.workloads.forecast.results import FILE, Drawn, ForecastResults, read

WIDE, TALL, MOST, LEAST = 760.0, 280.0, 1000.0, 500.0
"""Width and height of a chart along time, and the pixels that it may take."""
HALF = 560.0
"""Width of a chart that has another at its side."""
MOST_TICKS = 8
MOST_ROWS = 20
"""Series in the table, the best and the worst."""
ACTUAL, FORECAST, BASELINE = INK, "var(--series)", "var(--evaluated)"
OPACITY = (0.28, 0.14)
"""Of the bands, the narrow one first."""


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections that the run folder has data for; an unreadable file becomes text."""
    try:
        results = read(folder)
    except FileNotFoundError:  # the run has not ended
        return []
    except (OSError, ValueError, RecursionError) as error:
        said = f"{FILE} cannot be read: {str(error).splitlines()[0]}"
        return [ReportSection(title="Forecasts", html=f"<p>{escape(said)}</p>")]
    drawn = ((title, draw(results)) for title, draw in DRAWN.items())
    return [ReportSection(title=title, html=html) for title, html in drawn if html]


def verdict(results: ForecastResults) -> str:
    """Return whether the model beats the best baseline, as a sentence."""
    model, baseline = results.model, results.baseline
    if model.mae is None or baseline.mae is None:
        return "The errors are not finite, so the model cannot be compared with the baselines."
    numbers = f"MAE {model.mae:.4g} against {baseline.mae:.4g}"
    if model.mae < baseline.mae:
        less = 1 - model.mae / baseline.mae
        return f"The model beats the best baseline, {baseline.name}: {numbers}, {less:.1%} less."
    return f"The model does not beat the baseline {baseline.name}: {numbers}."


def _accuracy(results: ForecastResults) -> str:
    model, baseline = results.model.mae, results.baseline.mae
    better = model is not None and baseline is not None and model < baseline
    mark = "good" if better else "bad"
    lines = [f'<li class="{mark}">{escape(verdict(results))}</li>']
    if results.series_count > 1:
        share = results.series_beaten / results.series_count
        mark = "good" if share == 1 else "fair" if share > 0.5 else "bad"
        said = (
            f"It is better than {results.best_baseline} for {results.series_beaten:,} of "
            f"{results.series_count:,} series."
        )
        lines.append(f'<li class="{mark}">{escape(said)}</li>')
    heads = ("MAE", "MSE", "RMSE", "sMAPE", "MASE")
    rows = []
    for each in results.methods:
        values = (each.mae, each.mse, each.rmse, each.smape, each.mase)
        texts = ["" if value is None else f"{value:,.3f}" for value in values]
        weight = ' style="font-weight:600"' if each is results.model else ""
        cells = "".join(f'<td class="number">{text}</td>' for text in texts)
        rows.append(f"<tr{weight}>{_row_head(each.name)}{cells}</tr>")
    note = (
        f"{results.windows:,} {results.part} windows of {results.horizon:,} rows "
        f"({escape(results.step)} each) after {results.lookback:,} rows. MAE, MSE and RMSE are of "
        "values scaled by the training rows. sMAPE is in percent of the values themselves. MASE "
        f"is relative to the seasonal naive forecast of the training rows ({results.season} rows "
        "per season)."
    )
    return (
        f'<ul class="notices">{"".join(lines)}</ul>'
        + _table(("forecast", *heads), rows)
        + _noted(note)
    )


def _forecasts(results: ForecastResults) -> str:
    if not results.drawn:
        return ""
    levels = [each.level for each in results.coverage]
    parts = []
    for each in results.drawn:
        mase = "" if each.mase is None else f", MASE {each.mase:.3g}"
        title = f"{each.kind.capitalize()}: {each.name}{mase}"
        parts.append(f"<h3>{escape(title)}</h3>{_window(each, results.season)}")
    named = [(ACTUAL, "actual"), (FORECAST, "forecast"), (BASELINE, results.best_baseline)]
    bands = [
        (f"color-mix(in srgb,{FORECAST} {100 * share:.0f}%,transparent)", f"{level:.0%} interval")
        for level, share in zip(levels, OPACITY, strict=False)
    ]
    note = (
        f"The last {results.part} window of the series with the lowest, the median and the "
        "highest MASE, in the units of the series."
    )
    return "".join(parts) + legend([*named, *bands]) + _noted(note)


def _window(drawn: Drawn, season: int) -> str:
    """Draw what came before, the forecast with its intervals, and what happened."""
    before, ahead = len(drawn.before) * drawn.stride, len(drawn.forecast) * drawn.stride
    x = Scale(-before, max(ahead - drawn.stride, 1), 64, WIDE - 12)
    curves = (drawn.before, drawn.actual, drawn.forecast, *drawn.lower, *drawn.upper)
    known = [value for each in curves for value in each if value is not None]
    margin = (max(known) - min(known)) / 20
    y = Scale(min(known) - margin, max(known) + margin, TALL - 48, 20)
    marks = []
    for value, label in y.ticks():
        marks.append(line(x.start, y(value), x.end, y(value)))
        marks.append(text_mark(x.start - 8, y(value) + 4, label, anchor="end"))
    # Ticks a season apart show how much of the course is seasonal.
    distance = season * -(-(before + ahead) // (season * MOST_TICKS)) if season > 1 else 0
    ticks = (
        [float(row) for row in range(-(before // distance) * distance, ahead, distance)]
        if distance
        else [value for value, _ in x.ticks()]
    )
    for value in ticks:
        marks.append(line(x(value), y.start, x(value), y.end))
        marks.append(text_mark(x(value), y.start + 18, f"{value:,.0f}", anchor="middle"))
    label = "rows from the start of the forecast"
    marks.append(text_mark(x.end, y.start + 36, label, anchor="end"))
    marks.append(line(x(0), y.start, x(0), y.end, stroke=LINE, more="stroke-dasharray:4 4"))
    marks.append(text_mark(x(0) + 6, y.end - 4, f"{drawn.start} to {drawn.end}"))
    for lower, upper, share in zip(
        drawn.lower[::-1], drawn.upper[::-1], OPACITY[::-1][-len(drawn.lower) :], strict=False
    ):
        marks.append(
            _band(_points(lower, x, y, drawn.stride), _points(upper, x, y, drawn.stride), share)
        )
    marks += _curve(drawn.baseline, x, y, drawn.stride, BASELINE, wide=1.2)
    known_values = [*drawn.before, *drawn.actual]
    marks += _curve(known_values, x, y, drawn.stride, ACTUAL, start=-before)
    marks += _curve(drawn.forecast, x, y, drawn.stride, FORECAST)
    alt = (
        f"Forecast of {drawn.name} from {drawn.start} to {drawn.end} with the actual values and "
        "the values before."
    )
    return drawing(marks, width=WIDE, height=TALL, alt=alt, most=MOST, least=LEAST)


def _steps(results: ForecastResults) -> str:
    """Draw the error of the model and the baselines by step."""
    if results.horizon < 2:
        return ""
    curves = [(each.name, each.by_step) for each in results.methods]
    html = _by_step(results, curves, y_label="mean absolute error, scaled", width=WIDE)
    return html + _noted("Mean absolute error of each row of the forecast, over all windows.")


def _intervals(results: ForecastResults) -> str:
    """Return a table of the coverage of intervals, and its course over the steps."""
    if not results.coverage:
        return ""
    rows = []
    for each in results.coverage:
        measured = "" if each.measured is None else f"{each.measured:.1%}"
        rows.append(
            f'<tr><th scope="row">{each.level:.0%}</th><td class="number">{measured}</td>'
            f'<td class="number">{_number(each.width)}</td></tr>'
        )
    source = {
        "conformal": "Borders are conformal: quantiles of the absolute errors on the validation "
        "windows, per step.",
        "distribution": "Borders are quantiles that the model predicts.",
    }.get(results.interval_source, "")
    table = _table(("interval", "actual values inside", "mean width, scaled"), rows)
    chart = ""
    if results.horizon > 1:
        curves = [(f"{each.level:.0%} interval", each.by_step) for each in results.coverage]
        chart = _by_step(results, curves, y_label="share of actual values inside", percent=True)
    return table + chart + _noted(source)


def _residuals(results: ForecastResults) -> str:
    """Draw the distribution of residuals, and their mean by step."""
    counts, edges = results.residual_counts, [edge or 0.0 for edge in results.residual_edges]
    total = sum(counts)
    if not total or len(edges) != len(counts) + 1:
        return ""
    x = Scale(edges[0], edges[-1], 56, HALF - 12)
    y = Scale(0, max(counts) / total, TALL - 48, 24)
    marks = axes(x, y, x_label="actual value less forecast, scaled", y_label="share of values")
    for count, left, right in zip(counts, edges, edges[1:], strict=False):
        top = y(count / total)
        marks.append(box(x(left) + 0.5, top, x(right) - x(left) - 1, y.start - top, fill=FORECAST))
    marks.append(line(x(0), y.start, x(0), y.end, stroke=INK, more="stroke-dasharray:4 4"))
    alt = f"Histogram of {total:,} residuals between {edges[0]:.3g} and {edges[-1]:.3g}."
    histogram = drawing(marks, width=HALF, height=TALL, alt=alt, most=HALF * 1.2)
    figures = [histogram]
    if results.horizon > 1:
        figures.append(
            _by_step(results, [("mean residual", results.bias_by_step)], y_label="mean, scaled")
        )
    pair = "".join(f"<div>{each}</div>" for each in figures)
    note = (
        "The outermost bars hold all values beyond them. A mean above zero says that forecasts "
        "are too low."
    )
    return f'<div class="pair">{pair}</div>' + _noted(note)


def _series(results: ForecastResults) -> str:
    """Return a table of series, the best and the worst."""
    if results.series_count < 2:
        return ""
    listed = list(results.series)
    cut = len(listed) > MOST_ROWS
    if cut:
        listed = listed[: MOST_ROWS // 2] + listed[-MOST_ROWS // 2 :]
    rows = []
    for each in listed:
        beats = each.mae is not None and each.baseline is not None and each.mae < each.baseline
        rows.append(
            f"<tr>{_row_head(_short(each.name))}"
            f'<td class="number">{_number(each.mae)}</td>'
            f'<td class="number">{_number(each.baseline)}</td>'
            f'<td class="number">{_number(each.mase)}</td><td>{"yes" if beats else "no"}</td></tr>'
        )
    heads = ("series", "MAE", f"MAE of {results.best_baseline}", "MASE", "beats it")
    note = "In the units of the series, by MASE."
    if cut:
        note += f" The best and the worst {MOST_ROWS // 2} of {results.series_count:,} series."
    return _table(heads, rows) + _noted(note)


def _by_step(
    results: ForecastResults,
    curves: Sequence[tuple[str, Sequence[float | None]]],
    *,
    y_label: str,
    percent: bool = False,
    width: float = HALF,
) -> str:
    """Draw curves over the steps of the horizon."""
    known = [value for _, values in curves for value in values if value is not None]
    if not known:
        return ""
    # An exploding baseline would flatten all others.
    high = 1.0 if percent else min(max(known), 3 * sorted(known)[len(known) // 2] or max(known))
    low = min(0.0, *known)
    x = Scale(1, max(results.steps), 56, width - 12)
    y = Scale(low, high if high > low else low + 1, TALL - 48, 24)
    marks = axes(x, y, x_label="step", y_label=y_label)
    if low < 0:
        marks.append(line(x.start, y(0), x.end, y(0), stroke=LINE))
    shades = {name: _shade(place) for place, (name, _) in enumerate(curves)}
    for name, values in curves[::-1]:
        points = [
            (x(step), y(value))
            for step, value in zip(results.steps, values, strict=False)
            if value is not None
        ]
        marks.append(path(points, stroke=shades[name]))
    ends = ", ".join(
        f"{name} {values[0]:.3g} to {values[-1]:.3g}"
        for name, values in curves
        if values and values[0] is not None and values[-1] is not None
    )
    alt = f"{y_label} by step: {ends}."
    most, least = (MOST, LEAST) if width == WIDE else (width * 1.2, 0)
    chart = drawing(marks, width=width, height=TALL, alt=alt, most=most, least=least)
    return chart + (legend((shades[name], name) for name, _ in curves) if len(curves) > 1 else "")


def _shade(place: int) -> str:
    return FORECAST if place == 0 else colour(place)


def _points(
    values: Iterable[float | None], x: Scale, y: Scale, stride: int
) -> list[tuple[float, float]]:
    return [
        (x(place * stride), y(value)) for place, value in enumerate(values) if value is not None
    ]


def _curve(
    values: Sequence[float | None],
    x: Scale,
    y: Scale,
    stride: int,
    stroke: str,
    *,
    start: int = 0,
    wide: float = 2,
) -> list[str]:
    """Draw a curve, interrupted where values are missing."""
    marks, points = list[str](), list[tuple[float, float]]()
    for place, value in enumerate([*values, None]):
        if value is not None:
            points.append((x(start + place * stride), y(value)))
        elif points:
            marks.append(path(points, stroke=stroke, wide=wide))
            points = []
    return marks


def _band(
    lower: Sequence[tuple[float, float]], upper: Sequence[tuple[float, float]], share: float
) -> str:
    around = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
    return (
        f'<polygon points="{around}" style="fill:{FORECAST};fill-opacity:{share:g};stroke:none">'
        "</polygon>"
    )


def _table(heads: Sequence[str], rows: Iterable[str]) -> str:
    cells = "".join(
        f'<th scope="col"{" class=" + chr(34) + "number" + chr(34) if place else ""}>'
        f"{escape(head)}</th>"
        for place, head in enumerate(heads)
    )
    return (
        f'<div class="scroll"><table class="narrow"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row_head(name: str) -> str:
    return f'<th scope="row" style="white-space:nowrap">{escape(name)}</th>'


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _short(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:31]}…"


def _noted(said: str) -> str:
    return f'<p class="note">{said}</p>' if said else ""


DRAWN: Mapping[str, Callable[[ForecastResults], str]] = {
    "Forecast accuracy": _accuracy,
    "Forecasts": _forecasts,
    "Error by step": _steps,
    "Intervals": _intervals,
    "Residuals": _residuals,
    "Series": _series,
}
"""Sections by title; a section without data is left out."""
