"""The page of a run with what its workload adds to it."""

from pathlib import Path

from narrowcast.report.page import Sections, write_report
from narrowcast.runs import RunFolder


def write_run_report(folder: str | Path) -> Path:
    """Write the report of the run in `folder`, with the sections of its workload."""
    with RunFolder.open(folder) as run:
        found = run.read_json("resolved.json").get("workload", {}).get("value")
    return write_report(folder, sections=sections_of_report(str(found)))


def sections_of_report(workload: str) -> Sections | None:
    """Return what draws the sections of a workload's report; None where it adds none.

    A workload that is not installed here adds none either: a page can be made anywhere, later.
    """
    return SECTIONS.get(workload)


SECTIONS: dict[str, Sections] = {}
"""By workload; none of those that come with the library adds any."""
