"""Findings of a callback: to the user's function, or as one line of a log."""

from collections.abc import Callable

from narrowcast.runs import FindingRecord

Tell = Callable[[FindingRecord], object]
"""Takes a finding; its result is ignored."""


def sentence(finding: FindingRecord) -> str:
    """Return a finding as one line."""
    where = " ".join(part for part in (finding.module, finding.role) if part)
    rest = f"; {finding.remedy}" if finding.remedy else ""
    return f"step {finding.step}: {where}: {finding.what}: {finding.why}{rest}"
