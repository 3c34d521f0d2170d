"""One HTML page for a run: self-contained, and a pure function of the run folder."""

from narrowcast.report.page import write_report

__all__ = ["write_report"]
