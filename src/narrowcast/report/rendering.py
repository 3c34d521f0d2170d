"""From a template and its values to a page: one file that carries everything it needs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from narrowcast.errors import CheckpointError
from narrowcast.report.charts import inline
from narrowcast.report.charts.run_charts import Chart
from narrowcast.report.layers import bare_reason, width
from narrowcast.report.phrases import count, large, share, size
from narrowcast.runs.writing import explain_write_error, replace_file


def render(
    template: str, values: Mapping[str, Any], *, charts: Sequence[Chart], heat: Any = None
) -> str:
    """Fill `template`, with the charts' data, plotly, the style and the script inside."""
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
    )
    return environment.get_template(template).render(
        {
            **values,
            "policy": inline.security_policy(),
            "plotly": inline.packed_plotly()[0],
            "chart_data": inline.chart_data(charts),
            "heat_data": inline.script_json(heat),
            "script": inline.script(),
            "style": inline.asset("style.css"),
        }
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
