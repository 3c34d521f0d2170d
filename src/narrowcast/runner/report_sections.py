"""The page of a run with what its workload adds to it."""

from functools import partial
from pathlib import Path

from narrowcast.report.page import write_report
from narrowcast.runs import RunFolder
from narrowcast.workloads import report_sections


def write_run_report(folder: str | Path) -> Path:
    """Write the report of the run in `folder`, with the sections of its workload.

    A workload that is not installed here adds none: a page can be made anywhere, later.
    """
    with RunFolder.open(folder) as run:
        resolved = run.read_json("resolved.json")
    return write_report(folder, sections=partial(report_sections, resolved))
