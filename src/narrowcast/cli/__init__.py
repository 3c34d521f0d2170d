"""The command line: one file a verb; the only package that prints."""

from narrowcast.cli.entry import main

__all__ = ["main"]
