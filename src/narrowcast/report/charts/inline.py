"""What a page carries inside itself: plotly, its own script and style, and the charts' data.

A page may load nothing, and may run nothing but the two scripts it was made with: its
Content-Security-Policy says so, by the scripts' hashes. That is also why plotly's own addresses
(maps, fonts, its editor) cannot be fetched, and why a run's texts could not run even unescaped.

Plotly is 4.8 MB of text, of which no page needs to send more than the 2.0 MB it packs to; every
browser since 2023 unpacks it (`DecompressionStream`). The packed bytes, and so the page's, are
the same for one plotly and one zlib.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from markupsafe import Markup

from narrowcast.report.charts.run_charts import Chart


@cache
def packed_plotly() -> tuple[str, str]:
    """Return plotly's script as base64 of a zlib stream, and the source a policy knows it by."""
    script = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    packed = base64.b64encode(zlib.compress(script, 9)).decode()
    return packed, csp_source(script)


@cache
def asset(name: str) -> Markup:
    """Read one of the page's own files, to be put into it as it is."""
    text = files("narrowcast.report").joinpath("templates", name).read_text(encoding="utf-8")
    return Markup(text)


def script() -> Markup:
    """Return the page's own script."""
    return asset("heat.js") + asset("page.js")


def security_policy() -> str:
    """Write the page's Content-Security-Policy."""
    own = csp_source(script().encode())
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {own} {packed_plotly()[1]}",
            # Plotly sets its style by attributes and a style element.
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def chart_data(charts: Sequence[Chart]) -> Markup:
    """Write the charts as JSON that is safe inside a script element."""
    return script_json({c.name: {"data": c.data, "layout": c.layout} for c in charts})


def script_json(result: object) -> Markup:
    """Write plain data as JSON that is safe inside a script element."""
    text = json.dumps(result, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def csp_source(script: bytes) -> str:
    """Return what a policy knows `script` by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
