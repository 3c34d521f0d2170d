"""Commands that messages show."""

import shlex
from pathlib import Path


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run in `folder`, quoted for a shell."""
    path = str(folder)
    return f"narrowcast resume {shlex.quote(f'./{path}' if path.startswith('-') else path)}"
