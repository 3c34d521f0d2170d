"""What the report of a run says of numerals that were misread."""

import json
from collections.abc import Sequence
from pathlib import Path

from narrowcast.runs import Record, ReportSection


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the mistakes; they are known once the run has ended."""
    file = folder / "misread.json"
    misread = json.loads(file.read_text()) if file.exists() else ["not known before the end"]
    return [ReportSection(title="Misread numerals", html=f"<p>{', '.join(misread) or 'none'}</p>")]
