"""What the report of a genomic run adds: a pure function of its folder, drawn as HTML and SVG."""

from narrowcast.workloads.genomics.report.sections import sections

__all__ = ["sections"]
