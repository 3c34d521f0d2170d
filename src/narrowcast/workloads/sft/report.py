"""Report sections of a fine-tuning run: data, metrics, samples and functional networks."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from narrowcast.runs import Record, ReportSection, RunFolder
from narrowcast.workloads.sft.ica import report_section as networks
from narrowcast.workloads.sft.judge import report as judged


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections that the run folder has data for."""
    own = (networks, judged)
    return [
        *_folder_sections(folder),
        *(each for part in own for each in part.sections(folder, records)),
    ]


def _folder_sections(folder: Path) -> list[ReportSection]:
    lines = RunFolder(folder).task_info().notes
    if not lines:
        return []
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return [ReportSection(title="Model and data", html=f"<ul>{items}</ul>")]
