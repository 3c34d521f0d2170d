"""What a workload adds to the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from narrowcast.runs.records import Record


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A heading, and what stands below it."""

    title: str
    """Plain text."""
    html: str
    """Put into the page as it is: escape what comes from data."""


ReportSections: TypeAlias = Callable[[Path, Sequence[Record]], Sequence[ReportSection]]
"""From the run folder and its records to sections; pure: the same folder, the same text."""
