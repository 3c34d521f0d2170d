"""The report section: numerals that the model got wrong."""

import json
from collections.abc import Sequence
from pathlib import Path

from narrowcast.runs import Record, ReportSection


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the mistakes, which are known when the run has ended."""
    file = folder / "misread.json"
    misread = json.loads(file.read_text()) if file.exists() else ["known when the run has ended"]
    return [ReportSection(title="Misread numerals", html=f"<p>{', '.join(misread) or 'none'}</p>")]
