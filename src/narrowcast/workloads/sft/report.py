"""Report sections of a fine-tuning run: data, metrics, samples and functional networks."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from narrowcast.runs import Record, ReportSection, RunFolder
from narrowcast.workloads.sft.ica import page
from narrowcast.workloads.sft.judge import report


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections that the run folder has data for."""
    items = "".join(f"<li>{escape(line)}</li>" for line in RunFolder(folder).task_info().notes)
    data = ReportSection(title="Model and data", html=f"<ul>{items}</ul>")
    return [*([data] if items else []), *page.sections(folder), *report.sections(folder)]
