"""The live page: one document for every run.

A run's names arrive later as data and are set as text, so they cannot become markup.
"""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from narrowcast.report.charts import drawing
from narrowcast.report.charts.run_charts import TICKS
from narrowcast.report.charts.series import Series
from narrowcast.report.rendering import asset, csp_source, new_environment, script_json


@dataclass(frozen=True, kw_only=True)
class LiveDocument:
    """The response of a route."""

    kind: str
    """Its media type."""
    body: bytes
    packed: bytes = b""
    """The same under gzip, if that is worth having."""
    lasting: bool = False
    """Whether a browser may keep it."""


@cache
def documents() -> dict[str, LiveDocument]:
    """Return all documents by path."""
    plotly = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    # The name changes with the content, so a browser may keep it for good.
    path = f"/plotly-{hashlib.sha256(plotly).hexdigest()[:16]}.js"
    return {
        "/": LiveDocument(kind="text/html; charset=utf-8", body=_page(plotly=path)),
        path: LiveDocument(
            kind="text/javascript; charset=utf-8",
            body=plotly,
            packed=gzip.compress(plotly, 6, mtime=0),
            lasting=True,
        ),
    }


@cache
def security_policy() -> str:
    """Write the Content-Security-Policy of every answer."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {csp_source(asset('live.js').encode())} 'self'",
            "connect-src 'self'",
            # Plotly sets its style by attributes and a style element.
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _page(*, plotly: str) -> bytes:
    drawn = figures()
    return (
        new_environment()
        .get_template("live.html")
        .render(
            figures=drawn,
            small=SMALL,
            figure_data=script_json(drawn),
            plotly=plotly,
            script=asset("live.js"),
            style=asset("style.css") + asset("live.css"),
        )
        .encode()
    )


_NOTHING = Series(steps=(), values=())
_SPAN = (0, 1)

SMALL = {
    "speed": "Items per second",
    "memory": "Peak memory",
    "norm": "Gradient norm",
    "lr": "Learning rate",
    "lost": "Lost updates",
}
"""Small charts and their titles; one that never gets a value is not shown."""


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
    layout["yaxis"].update({"rangemode": "tozero"} | TICKS.get(name, {}))
    return {
        "title": title,
        "data": [_line(title.lower(), color="@series", width=1.25)],
        "layout": layout,
    }


def _line(name: str, *, color: str, width: float) -> dict[str, Any]:
    return drawing.line(_NOTHING, name=name, color=color, width=width) | {"mode": "lines"}


def _changes() -> dict[str, Any]:
    """Mark changes of format on the strip below the losses; the page adds a line up from each."""
    trace = drawing.events("format changed", {}, row=1, symbol="diamond", color="@eight")
    return trace | {"error_x": {"type": "data", "array": [], "visible": False}}
