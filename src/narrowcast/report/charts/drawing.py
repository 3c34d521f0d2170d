"""Lines, points, marks and axes of charts, as plotly's data.

The page replaces a colour `@name` by its custom property `--name`, to follow light and dark.
"""

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from narrowcast.report.charts.series import Mark, Series
from narrowcast.report.phrases import count, power_of_two, scale

STRIP_ROW = 0.055
"""Share of a chart's height that one row of marks takes."""

COLOURS = 8
"""Lines that have a colour of their own; after them the colours begin again."""
PERCENT = ".3~p"
"""How d3 writes shares on an axis."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Dashes keep overlapping lines visible and distinguishable without colour."""

_AXIS = {
    "gridcolor": "@grid",
    "zeroline": False,
    "linecolor": "@line",
    "tickcolor": "@line",
    "tickfont": {"color": "@quiet", "size": 12},
}


def line(drawn: Series, *, name: str, color: str, width: float) -> dict[str, Any]:
    """Draw a thin line, or a dot where there is but one point."""
    # Plotly reads some HTML in names and texts; a metric's name is none.
    name = html.escape(name)
    return {
        "type": "scatter",
        "mode": "lines" if len(drawn.steps) > 1 else "markers",
        "name": name,
        "x": list(drawn.steps),
        "y": [rounded(y) for y in drawn.values],
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 6},
        "hovertemplate": f"{name}: %{{y:.4~g}}<extra></extra>",
    }


def one_of_many(drawn: Series, *, name: str, index: int, width: float) -> dict[str, Any]:
    """Draw a line among others, with the colour and the dashes of its index."""
    drawing = line(drawn, name=name, color=colour(index), width=width)
    drawing["line"]["dash"] = DASHES[index % len(DASHES)]
    return drawing


def colour(position: int) -> str:
    """Return the colour of one of many lines."""
    return f"@group{position % COLOURS}"


def stairs(drawn: Series, *, name: str, color: str) -> dict[str, Any]:
    """Draw a loss scale: a record carries the scale its step ran with, so a step is level."""
    return {
        **line(drawn, name=name, color=color, width=2),
        "line": {"color": color, "width": 2, "shape": "hv"},
        "text": ["" if y is None else scale(y) for y in drawn.values],
        "hovertemplate": f"{html.escape(name)}: %{{text}}<extra></extra>",
    }


def points(drawn: Series, *, name: str) -> dict[str, Any]:
    """Draw few values that matter: dots, dotted together."""
    return {
        **line(drawn, name=name, color="@evaluated", width=1.5),
        "mode": "lines+markers" if len(drawn.steps) < 60 else "lines",
        "line": {"color": "@evaluated", "width": 1, "dash": "dot"},
        "marker": {
            "color": "@evaluated",
            "size": 8,
            "line": {"color": "@paper", "width": 1.5},
        },
    }


def strip(marks: Sequence[Mark], *, row: int) -> dict[str, Any]:
    """Mark skipped steps on a strip of their own below the losses, which may not be finite."""
    return {
        **_track("skipped", [(m.first, _mark_text(m)) for m in marks], row=row),
        "marker": {
            "symbol": "line-ns-open",
            "size": 11,
            "color": "@skipped",
            "line": {"color": "@skipped", "width": 1.5},
        },
        # A row of neighbours is drawn as far as it reaches.
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [m.last - m.first for m in marks],
            "arrayminus": [0] * len(marks),
            "width": 0,
            "thickness": 8,
            "color": "@skipped",
        },
    }


def events(
    name: str, info: Mapping[int, Sequence[str]], *, row: int, symbol: str, color: str
) -> dict[str, Any]:
    """Mark steps at which something happened on the strip, each with what it was."""
    matches = [(step, _event_text(name, lines)) for step, lines in info.items()]
    return {**_track(name, matches, row=row), "marker": _marker(symbol, color)}


def uprights(steps: Sequence[float], *, color: str) -> list[dict[str, Any]]:
    """Draw a dotted line from top to bottom at each of the steps."""
    ends = {"yref": "paper", "y0": 0, "y1": 1}
    return [dotted(color) | ends | {"x0": step, "x1": step} for step in steps]


def dotted(color: str) -> dict[str, Any]:
    """Return a dotted line behind the curves, without its ends."""
    return {
        "type": "line",
        "layer": "below",
        "line": {"color": color, "width": 1, "dash": "dot"},
    }


def _marker(symbol: str, color: str) -> dict[str, Any]:
    return {"symbol": symbol, "size": 9, "color": color, "line": {"color": "@paper", "width": 1}}


def _track(name: str, result: Sequence[tuple[int, str]], *, row: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "yaxis": "y2",
        "x": [step for step, _ in result],
        "y": [row] * len(result),
        "text": [text for _, text in result],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _event_text(name: str, lines: Sequence[str]) -> str:
    """Write what hovering over an event says; of many at one step, the first few."""
    shown = [f"{name}: {line}" for line in lines[:3]]
    if len(lines) > 3:
        shown.append(f"and {len(lines) - 3} more")
    wrapped = [part for line in shown for part in textwrap.wrap(line, 60, max_lines=4)]
    return "<br>".join(html.escape(part) for part in wrapped)


def overflows(marks: Sequence[Mark]) -> dict[str, Any]:
    """Mark skipped steps on the loss scale they happened at."""
    finite = [m for m in marks if math.isfinite(m.loss_scale) and m.loss_scale > 0]
    return {
        **_track("skipped", [(m.first, _mark_text(m)) for m in finite], row=0),
        "yaxis": "y",
        "y": [rounded(m.loss_scale) for m in finite],
        "marker": _marker("triangle-down", "@skipped"),
    }


def _mark_text(mark: Mark) -> str:
    """Write what hovering over skipped steps says below the step, safe for plotly's markup."""
    if mark.first == mark.last:
        what = "skipped"
    else:
        what = f"{count(mark.steps)} skipped, up to step {count(mark.last)}"
    lines = textwrap.wrap(f"{what}: {mark.why}" if mark.why else what, 60, max_lines=6)
    return "<br>".join(html.escape(line) for line in lines)


def layout(steps: Sequence[int], *, height: int) -> dict[str, Any]:
    """Lay a chart over `steps` out: quiet axes, no box, the legend above."""
    # The same range in every chart, whatever it marks, so that they stand under one another.
    spare = max(1, steps[-1] - steps[0]) * 0.01
    return {
        "height": height,
        # Charts of one name are zoomed together.
        "meta": "step",
        "margin": {"l": 64, "r": 24, "t": 8, "b": 28},
        "paper_bgcolor": "@paper",
        "plot_bgcolor": "@paper",
        "font": {"color": "@ink", "size": 13},
        "xaxis": {
            **_AXIS,
            "range": [rounded(steps[0] - spare), rounded(steps[-1] + spare)],
            # Few steps would be labelled in fractions, all rounded to the same number.
            **({"dtick": 1} if steps[-1] - steps[0] < 10 else {}),
            "showgrid": False,
            "showline": True,
            "tickformat": ",d",
            "unifiedhovertitle": {"text": "step %{x:,d}"},
            "ticks": "outside",
            "ticklen": 4,
        },
        "yaxis": {**_AXIS, "nticks": 6},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "xanchor": "left"},
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "@raised",
            "bordercolor": "@line",
            "font": {"color": "@ink", "size": 13},
            "align": "left",
        },
    }


def strip_axis(rows: int) -> dict[str, Any]:
    """Make the vertical axis of the strip under a chart, for so many rows of marks."""
    return {
        "domain": [0, STRIP_ROW * rows],
        "range": [rows - 0.4, -0.6],
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
        "showticklabels": False,
    }


def powers_of_two(finite: Sequence[float]) -> dict[str, Any]:
    """Make a logarithmic axis whose ticks are powers of two, at most seven of them."""
    low, high = math.floor(math.log2(min(finite))), math.ceil(math.log2(max(finite)))
    stride = max(1, math.ceil((high - low) / 6))
    ticks = [2.0**k for k in range(low, high + 1, stride)]
    margin = 0.08 * max(2, high - low) * math.log10(2)
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [power_of_two(tick) if high > 20 or low < 0 else scale(tick) for tick in ticks],
        "range": [
            rounded(low * math.log10(2) - margin),
            rounded(high * math.log10(2) + margin),
        ],
    }


def rounded(y: float | None) -> float | None:
    """Round to six digits: more than a screen shows, and half the bytes."""
    return None if y is None else float(f"{y:.6g}")
