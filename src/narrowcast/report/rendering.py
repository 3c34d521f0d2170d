"""Renders a template to one file that carries everything it needs.

The Content-Security-Policy allows only the page's two scripts, by their hashes, and no requests.
Plotly is packed from 4.8 to 2.0 MB, and browsers since 2023 unpack it (`DecompressionStream`).
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from narrowcast.errors import CheckpointError
from narrowcast.report.charts.run_charts import Chart
from narrowcast.report.layers import bare_reason, width
from narrowcast.report.phrases import count, large, said, share, size
from narrowcast.runs.writing import explain_write_error, replace_file


def new_environment() -> Environment:
    """Return the environment that fills the templates of pages."""
    environment = Environment(
        loader=PackageLoader("narrowcast.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        count=count,
        large=large,
        share=share,
        size=size,
        width=width,
        bare_reason=bare_reason,
        coded=_coded,
        breakable=_breakable,
        said=said,
    )
    return environment


def render(
    template: str, values: Mapping[str, Any], *, charts: Sequence[Chart], heat: Any = None
) -> str:
    """Fill `template`, with the charts' data, plotly, the style and the script inside."""
    return (
        new_environment()
        .get_template(template)
        .render(
            {
                **values,
                "policy": security_policy(),
                "plotly": packed_plotly()[0],
                "chart_data": chart_data(charts),
                "heat_data": script_json(heat),
                "script": script(),
                "style": asset("style.css"),
            }
        )
    )


def write_page(target: Path, page: str) -> Path:
    """Write a page, whole or not at all."""
    if target.exists() and not target.is_file():
        kind = "folder" if target.is_dir() else "device or a pipe"
        raise CheckpointError(f"cannot write {target} because it is a {kind}. Name a file")
    try:
        replace_file(target, page.encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {explain_write_error(error)}") from error
    return target


def _coded(text: str) -> Markup:
    """Escape `text`, and set what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _breakable(key: str) -> Markup:
    """Escape the dotted key of a setting, and let a narrow screen break it behind its dots."""
    return Markup(".<wbr>").join(key.split("."))


@cache
def packed_plotly() -> tuple[str, str]:
    """Return plotly's script as base64 of a zlib stream, and the source a policy knows it by."""
    script = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    packed = base64.b64encode(zlib.compress(script, 9)).decode()
    return packed, csp_source(script)


@cache
def asset(name: str) -> Markup:
    """Read one of the page's own files, to be inlined."""
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
