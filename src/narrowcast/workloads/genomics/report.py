"""What the report of a genomic run adds."""

from collections.abc import Sequence
from pathlib import Path

from narrowcast.runs import Record, ReportSection


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections, of what the folder has."""
    return []
