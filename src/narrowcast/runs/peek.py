"""Reading files that another process writes, or that come from a stranger.

Links are not followed, so that a browser is shown nothing from outside the folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from narrowcast.plain_files import open_plain
from narrowcast.runs import strict_json


def peek_json(path: Path, *, most_bytes: int) -> Any:
    """Return the content of `path`, or None if it is missing, too large or not JSON."""
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                return None
            return strict_json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None
