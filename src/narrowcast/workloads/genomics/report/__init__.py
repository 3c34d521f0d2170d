"""Report sections of a genomics run, as HTML and SVG; a pure function of the run folder."""

from narrowcast.workloads.genomics.report.sections import sections

__all__ = ["sections"]
