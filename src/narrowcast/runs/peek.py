"""Reading a file of a folder that another process writes to, or that a stranger has made.

What is shown to a browser is never the target of a link, so that what lies outside the folder is
not read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from narrowcast.plain_files import open_plain
from narrowcast.runs import strict_json


def peek_json(path: Path, *, most_bytes: int) -> Any:
    """Return what `path` holds, or None where it is not there, too large or not JSON."""
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                return None
            return strict_json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None
