"""The live page of a run: read as it is written, served on this machine alone."""

from narrowcast.report.live.server import DEFAULT_PORT, WatchServer

__all__ = ["DEFAULT_PORT", "WatchServer"]
