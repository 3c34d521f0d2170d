"""Report sections of a decomposition, as HTML and SVG; a pure function of the run folder."""

from narrowcast.workloads.decompose.report.sections import sections

__all__ = ["sections"]
