"""How findings leave a callback: to a function of its owner, or as one line of a log."""

from collections.abc import Callable

from narrowcast.runs import FindingRecord

Tell = Callable[[FindingRecord], object]
"""Takes a finding; what it returns is not looked at."""


def sentence(finding: FindingRecord) -> str:
    """Write a finding as one line."""
    where = " ".join(part for part in (finding.module, finding.role) if part)
    rest = f"; {finding.remedy}" if finding.remedy else ""
    return f"step {finding.step}: {where}: {finding.what}: {finding.why}{rest}"
