"""The command line: one file per verb; the only package that prints."""

from narrowcast.cli.entry import main

__all__ = ["main"]
