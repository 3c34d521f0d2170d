"""What the report of a decomposition adds: a pure function of its folder, drawn as HTML and SVG."""

from narrowcast.workloads.decompose.report.sections import sections

__all__ = ["sections"]
