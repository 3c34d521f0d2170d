"""The page of a run: read the folder, lay everything out, write `report.html` beside it."""

from pathlib import Path
from typing import Any

from narrowcast.report import tables
from narrowcast.report.charts.heat import HeatMap, heat_map
from narrowcast.report.charts.run_charts import Chart, loss_chart, scale_chart, small_charts
from narrowcast.report.charts.spread import spread_charts, spread_note
from narrowcast.report.in_force import in_force
from narrowcast.report.layers import format_shares, layers
from narrowcast.report.rendering import render, write_page
from narrowcast.report.run_data import RunData, read_story
from narrowcast.report.sentences import sentences
from narrowcast.report.speed import speed_table
from narrowcast.report.summary import ending, facts, headline

FILE = "report.html"


def write_report(run_path: str | Path) -> Path:
    """Write the page of the run in `run_path`, and return where it is.

    The page depends on the folder's files alone: not on their path, nor on the time.
    """
    path = Path(run_path)
    return write_page(path / FILE, page_of(read_story(path)))


def page_of(story: RunData) -> str:
    """Make the page of a run."""
    loss = loss_chart(story) if story.steps else None
    scale = scale_chart(story) if story.steps else None
    small, spread = small_charts(story), spread_charts(story.exponents)
    heat = heat_map(story.health)
    values = {
        **_told(story),
        **_tables(story),
        "loss": loss,
        "scale": scale,
        "small": small,
        "spread": spread,
        "spread_note": spread_note(story.exponents),
        "heat": heat,
    }
    charts: list[Chart] = [c for c in (loss, scale, *small, *spread) if c is not None]
    return render("page.html", values, charts=charts, heat=_drawn(heat))


def _drawn(heat: HeatMap | None) -> dict[str, Any] | None:
    return None if heat is None else heat.data


def _told(story: RunData) -> dict[str, Any]:
    return {
        "story": story,
        "ending": ending(story),
        "headline": headline(story),
        "sentences": sentences(story),
        "facts": facts(story),
    }


def _tables(story: RunData) -> dict[str, Any]:
    chosen, defaults = tables.settings(story)
    ended = in_force(story.modules, story.changes, phases=story.phases)
    return {
        "reasons": tables.reasons(story),
        "evals": tables.eval_table(story),
        "findings": tables.findings(story),
        "layers": layers(story.modules, ended),
        "ended": ended,
        "shares": format_shares(story.modules),
        "memory": tables.bytes_by_role(story.plan or {}),
        "peak_bytes": max((record.peak_bytes for record in story.steps), default=0),
        "speed": speed_table(story),
        "chosen": chosen,
        "defaults": defaults,
        "surroundings": tables.surroundings(story),
        "few_rows": tables.FEW_ROWS,
        "most_rows": tables.MOST_ROWS,
    }
