"""The live page as it is served: one document with nothing of a run in it, and plotly beside it.

All that comes from a run arrives later, as data, and is set as text. So the page is the same for
every run, and a run's names have no way to become markup.
"""

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from narrowcast.report.charts import inline
from narrowcast.report.live.figures import SMALL, figures


@dataclass(frozen=True, kw_only=True)
class LiveDocument:
    """What a route answers with."""

    kind: str
    """Its media type."""
    body: bytes
    packed: bytes = b""
    """The same under gzip, if that is worth having."""
    lasting: bool = False
    """Whether a browser may keep it."""


@cache
def documents() -> dict[str, LiveDocument]:
    """Return every document by its path; there are no others."""
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
            f"script-src {inline.csp_source(inline.asset('live.js').encode())} 'self'",
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
    environment = Environment(
        loader=PackageLoader("narrowcast.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    drawn = figures()
    return (
        environment.get_template("live.html")
        .render(
            figures=drawn,
            small=SMALL,
            # Inside a script element, nothing may look like its end.
            figure_data=Markup(json.dumps(drawn, allow_nan=False).replace("<", "\\u003c")),
            plotly=plotly,
            script=inline.asset("live.js"),
            style=inline.asset("style.css") + inline.asset("live.css"),
        )
        .encode()
    )
