"""The report of a run with the sections of its strategy and workload."""

from collections.abc import Sequence
from pathlib import Path

from narrowcast.report.page import write_report
from narrowcast.runs import Record, ReportSection, RunFolder
from narrowcast.strategies.hybrid.report import report_sections as strategy_sections
from narrowcast.workloads import report_sections


def write_run_report(folder: str | Path) -> Path:
    """Write the report of the run in `folder`; a workload that is not installed adds no section."""
    with RunFolder.open(folder) as run:
        resolved, task = run.read_json("resolved.json"), run.task_info()

    def sections(path: Path, records: Sequence[Record]) -> list[ReportSection]:
        own = report_sections(resolved, path, records)
        return [*strategy_sections(records, task), *own]

    return write_report(folder, sections=sections)
