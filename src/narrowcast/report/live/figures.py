"""The charts of the live page without their data, in the report's style.

The page fills in what the server sends, so that a growing run costs its new steps only.
"""

from typing import Any

from narrowcast.report.charts import drawing
from narrowcast.report.charts.series import Series

_NOTHING = Series(steps=(), values=())
_SPAN = (0, 1)

SMALL = {
    "speed": "Items per second",
    "memory": "Peak memory",
    "norm": "Gradient norm",
    "lr": "Learning rate",
    "lost": "Lost updates",
}
"""Small charts and their titles; one that never gets a value is not shown. What a run counts
arrives with its head, and names the speed."""


def figures() -> dict[str, dict[str, Any]]:
    """Return name, title, traces and layout of each chart."""
    return {"loss": _loss(), "headline": _headline(), "parts": _parts(), "scale": _scale()} | {
        name: _small(name, title) for name, title in SMALL.items()
    }


def _loss() -> dict[str, Any]:
    layout = drawing.layout(_SPAN, height=400)
    layout["yaxis2"] = drawing.strip_axis(rows=2)
    layout["xaxis"]["anchor"] = "y2"
    return {
        "title": "Loss",
        "data": [
            _line("training", color="@faint", width=1),
            _line("smoothed", color="@series", width=2),
            drawing.points(_NOTHING, name="evaluated"),
            drawing.strip([], row=0),
            _changes(),
        ],
        "layout": layout,
    }


def _headline() -> dict[str, Any]:
    layout = drawing.layout(_SPAN, height=260)
    layout["showlegend"] = False
    trace = drawing.points(_NOTHING, name="evaluated")
    return {"title": "Evaluated", "data": [trace], "layout": layout}


def _parts() -> dict[str, Any]:
    """Draw as many parts of the loss as there are colours; the page keeps those it gets."""
    layout = drawing.layout(_SPAN, height=300)
    layout["showlegend"] = True
    lines = [
        drawing.one_of_many(_NOTHING, name="", index=location, width=1.75) | {"mode": "lines"}
        for location in range(drawing.COLOURS)
    ]
    return {"title": "Loss parts", "data": lines, "layout": layout}


def _scale() -> dict[str, Any]:
    layout = drawing.layout(_SPAN, height=260)
    return {
        "title": "Loss scale",
        "data": [
            drawing.stairs(_NOTHING, name="loss scale", color="@series") | {"mode": "lines"},
            drawing.overflows([]),
        ],
        "layout": layout,
    }


def _small(name: str, title: str) -> dict[str, Any]:
    layout = drawing.layout(_SPAN, height=200)
    layout["showlegend"] = False
    ticks = {"lost": {"tickformat": ".3~p"}, "lr": {"exponentformat": "e"}}
    layout["yaxis"].update({"rangemode": "tozero"} | ticks.get(name, {}))
    return {
        "title": title,
        "data": [_line(title.lower(), color="@series", width=1.25)],
        "layout": layout,
    }


def _line(name: str, *, color: str, width: float) -> dict[str, Any]:
    return drawing.line(_NOTHING, name=name, color=color, width=width) | {"mode": "lines"}


def _changes() -> dict[str, Any]:
    """Mark changes of format on the strip below the losses; the page adds a line up from each."""
    return drawing.strip([], row=1) | {
        "name": "format changed",
        "error_x": {"type": "data", "array": [], "visible": False},
        "marker": {
            "symbol": "diamond",
            "size": 9,
            "color": "@eight",
            "line": {"color": "@paper", "width": 1},
        },
    }
