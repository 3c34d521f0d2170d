"""Commands that messages tell people to type."""

import shlex
from pathlib import Path


def resume_command(folder: Path) -> str:
    """Return what continues the run in `folder`, whatever blanks or dashes its path has."""
    path = str(folder)
    return f"narrowcast resume {shlex.quote(f'./{path}' if path.startswith('-') else path)}"
