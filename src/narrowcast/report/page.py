"""The page of a run: read the folder, lay everything out, write `report.html` beside it."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from narrowcast.errors import CheckpointError
from narrowcast.report import inline, tables
from narrowcast.report.charts import loss_chart, scale_chart, small_charts
from narrowcast.report.layers import bare_reason, format_shares, layers, width
from narrowcast.report.phrases import count, large, share, size
from narrowcast.report.story import Story, read_story
from narrowcast.report.summary import ending, facts, headline
from narrowcast.runs.writing import explain_write_error, replace_file

FILE = "report.html"


def write_report(run_path: str | Path) -> Path:
    """Write the page of the run in `run_path`, and return where it is.

    The page depends on the folder's files alone: not on their path, nor on the time.
    """
    path = Path(run_path)
    page = render(read_story(path))
    target = path / FILE
    try:
        replace_file(target, page.encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {explain_write_error(error)}") from error
    return target


def render(story: Story) -> str:
    """Make the page of a run."""
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
    )
    return environment.get_template("page.html").render(_context(story))


def _context(story: Story) -> dict[str, Any]:
    loss = loss_chart(story) if story.steps else None
    scale = scale_chart(story) if story.steps else None
    small = small_charts(story)
    chosen, defaults = tables.settings(story)
    return {
        "story": story,
        "ending": ending(story),
        "headline": headline(story),
        "facts": facts(story),
        "loss": loss,
        "scale": scale,
        "small": small,
        "reasons": tables.reasons(story),
        "evals": tables.eval_table(story),
        "findings": tables.findings(story),
        "layers": layers(story.modules),
        "shares": format_shares(story.modules),
        "memory": tables.bytes_by_role(story.plan or {}),
        "peak_bytes": max((record.peak_bytes for record in story.steps), default=0),
        "chosen": chosen,
        "defaults": defaults,
        "surroundings": tables.surroundings(story),
        "most_rows": tables.MOST_ROWS,
        "policy": inline.security_policy(),
        "plotly": inline.packed_plotly()[0],
        "chart_data": inline.chart_data([c for c in (loss, scale, *small) if c is not None]),
        "script": inline.asset("page.js"),
        "style": inline.asset("style.css"),
    }


def _coded(text: str) -> Markup:
    """Escape `text`, and set what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
