"""The page of a comparison: a table, and the curves of the groups over steps and over seconds."""

import math
from pathlib import Path
from typing import Any

from narrowcast.report.charts import drawing
from narrowcast.report.charts.run_charts import Chart
from narrowcast.report.charts.series import series
from narrowcast.report.compare.comparison import INTERVAL, Comparison
from narrowcast.report.compare.groups import Group, mean_curve
from narrowcast.report.compare.rows import headline, metric_text, rows, titles
from narrowcast.report.phrases import capital, count, duration, measured
from narrowcast.report.rendering import render, write_page


def write_comparison(comparison: Comparison, target: str | Path) -> Path:
    """Write the page of a comparison to the file `target`."""
    charts = [_by_step(comparison), _by_seconds(comparison)]
    values = {
        "comparison": comparison,
        "headline": headline(comparison),
        "rows": rows(comparison),
        "columns": titles(comparison),
        "interval": INTERVAL,
        "charts": charts,
        "colours": [
            drawing.colour(location).removeprefix("@") for location in range(len(comparison.groups))
        ],
    }
    return write_page(Path(target), render("compare.html", values, charts=charts))


def _by_step(comparison: Comparison) -> Chart:
    data = []
    for position, group in enumerate(comparison.groups):
        data += (
            _band(group, position) if len(group.seeds) > 1 else _lines(group, position, x="step")
        )
    terms = comparison.terms
    return Chart(
        name="bystep",
        title=f"{capital(metric_text(terms.metric))} over steps",
        alt=_alt(comparison, "at_step", when=f"At step {count(terms.step)}"),
        data=data,
        layout=_layout(comparison, "step"),
        log_switch=min(_values(comparison)) > 0,
        note="Lines are means over seeds, bands are 95 % intervals."
        if any(len(group.seeds) > 1 for group in comparison.groups)
        else "",
    )


def _by_seconds(comparison: Comparison) -> Chart:
    data = []
    for location, group in enumerate(comparison.groups):
        data += _lines(group, location, x="seconds")
    terms = comparison.terms
    layout = _layout(comparison, "seconds")
    layout["xaxis"].update(
        ticksuffix=" s", tickformat="~r", unifiedhovertitle={"text": "%{x:.4~r} s"}
    )
    layout["xaxis"].pop("dtick", None)
    layout["shapes"] = [
        *drawing.uprights([terms.seconds], color="@quiet"),
        *_level(terms.target, comparison),
    ]
    return Chart(
        name="byseconds",
        title=f"{capital(metric_text(terms.metric))} over training time",
        alt=_alt(comparison, "at_seconds", when=f"After {duration(terms.seconds)}"),
        data=data,
        layout=layout,
        log_switch=min(_values(comparison)) > 0,
        note=(
            f"One line per run. The dotted lines mark {duration(terms.seconds)}, where the "
            f"shortest run ends, and {measured(terms.metric, terms.target)}, the target value of "
            "the table. Only time in training steps counts, excluding evaluations and checkpoints."
        ),
    )


def _lines(group: Group, location: int, *, x: str) -> list[dict[str, Any]]:
    """Draw each run of a group, under one name in the legend."""
    result = []
    for number, run in enumerate(group.runs):
        curve = series(range(len(run.points)), [p.value for p in run.points])
        trace = drawing.one_of_many(curve, name=group.label, index=location, width=1.75)
        trace["x"] = [drawing.rounded(getattr(p, x)) for p in run.points]
        trace |= {"legendgroup": str(location), "showlegend": number == 0}
        result.append(trace)
    return result


def _band(group: Group, location: int) -> list[dict[str, Any]]:
    """Draw the mean of a group over its common steps, and its interval as a band."""
    known = mean_curve(group)
    edge = [(step, m.high) for step, m in known] + [(step, m.low) for step, m in known[::-1]]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": [step for step, _ in edge],
        "y": [drawing.rounded(y) for _, y in edge],
        "fill": "toself",
        "fillcolor": f"{drawing.colour(location)}band",
        "line": {"color": drawing.colour(location), "width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": str(location),
    }
    mean = series([step for step, _ in known], [m.mean for _, m in known])
    line = drawing.one_of_many(mean, name=group.label, index=location, width=2)
    return [band, {**line, "legendgroup": str(location)}]


def _layout(comparison: Comparison, x: str) -> dict[str, Any]:
    """Lay out a chart over `step` or `seconds`."""
    at = [getattr(p, x) for g in comparison.groups for run in g.runs for p in run.points]
    layout = drawing.layout([math.floor(min(at)), math.ceil(max(at))], height=380)
    layout["meta"] = x
    if comparison.terms.metric.text.endswith("%"):
        layout["yaxis"]["tickformat"] = drawing.PERCENT
    # Many long names would cover the chart.
    layout["legend"] |= {"font": {"size": 12}}
    return layout


def _level(y: float, comparison: Comparison) -> list[dict[str, Any]]:
    """Draw the target where the curves are; one far away would flatten them."""
    values = _values(comparison)
    if not min(values) <= y <= max(values):
        return []
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return [drawing.dotted("@quiet") | ends]


def _values(comparison: Comparison) -> list[float]:
    return [p.value for g in comparison.groups for run in g.runs for p in run.points]


def _alt(comparison: Comparison, field: str, *, when: str) -> str:
    lines = [
        f"{group.label} {measured(comparison.terms.metric, matched.mean)}"
        for group in comparison.groups
        if (matched := getattr(group, field)) is not None
    ]
    return f"{when}: {', '.join(lines)}."
