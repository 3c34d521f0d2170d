"""The page of a run: read the folder, lay everything out, write `report.html` beside it."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from narrowcast.report import tables
from narrowcast.report.charts.heat import heat_map
from narrowcast.report.charts.run_charts import (
    headline_chart,
    loss_chart,
    parts_chart,
    scale_chart,
    small_charts,
)
from narrowcast.report.charts.spread import spread_charts, spread_note
from narrowcast.report.layers import active_formats, format_shares, layers
from narrowcast.report.rendering import render, write_page
from narrowcast.report.run_data import RunData, read_run
from narrowcast.report.summary import ending, facts, headline, sentences
from narrowcast.runs.report_section import ReportSection, ReportSections

FILE = "report.html"


def write_report(run_path: str | Path, *, sections: ReportSections | None = None) -> Path:
    """Write the page of the run in `run_path`, from its files alone, and return its path."""
    path = Path(run_path)
    data = read_run(path)
    own = sections(path, data.records) if sections is not None else ()
    return write_page(path / FILE, render_page(data, own))


def render_page(data: RunData, own: Sequence[ReportSection] = ()) -> str:
    """Return the page of a run, with the sections of its workload."""
    loss = loss_chart(data) if data.steps else None
    scale = scale_chart(data) if data.steps else None
    judged, parts = headline_chart(data), parts_chart(data)
    small, spread = small_charts(data), spread_charts(data.exponents)
    heat = heat_map(data.health)
    chosen, defaults = tables.settings(data)
    ended = active_formats(data.modules, data.changes, phases=data.phases)
    values = {
        "run": data,
        "ending": ending(data),
        "headline": headline(data),
        "sentences": sentences(data),
        "facts": facts(data),
        "reasons": tables.reasons(data),
        "evals": tables.eval_table(data),
        "directions": tables.directions(data),
        "findings": tables.findings(data),
        "layers": layers(data.modules, ended),
        "ended": ended,
        "shares": format_shares(data.modules),
        "memory": tables.bytes_by_role(data.plan or {}),
        "peak_bytes": max((record.peak_bytes for record in data.steps), default=0),
        "speed": tables.speed_table(data),
        "chosen": chosen,
        "defaults": defaults,
        "surroundings": tables.surroundings(data),
        "few_rows": tables.FEW_ROWS,
        "most_rows": tables.MOST_ROWS,
        "loss": loss,
        "judged": judged,
        "parts": parts,
        "scale": scale,
        "small": small,
        "spread": spread,
        "spread_note": spread_note(data.exponents),
        "heat": heat,
        "own": [(section.title, Markup(section.html)) for section in own],
    }
    charts = [c for c in (loss, judged, parts, scale, *small, *spread) if c is not None]
    return render("page.html", values, charts=charts, heat=heat and heat.data)
