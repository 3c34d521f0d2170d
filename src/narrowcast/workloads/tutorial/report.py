"""What the report of a run says of numerals that were misread."""

import json
from collections.abc import Sequence
from pathlib import Path

from narrowcast.runs import Record, ReportSection


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the mistakes, once the run has ended."""
    if not (file := folder / "misread.json").exists():
        return []
    html = f"<p>{', '.join(json.loads(file.read_text())) or 'None.'}</p>"
    return [ReportSection(title="Misread numerals", html=html)]
