"""Commands that messages tell people to type."""

import shlex
from pathlib import Path


def resume_command(folder: Path) -> str:
    """Return what continues the run in `folder`, whatever blanks its path has."""
    return f"narrowcast resume {shlex.quote(str(folder))}"
