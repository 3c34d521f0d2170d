"""Reading a file of a folder that another process writes to, or that a stranger has made.

Only a plain file is opened: a pipe in the place of a file does not make the reader wait. What is
shown to a browser is never the target of a link, so that what lies outside the folder is not read.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from narrowcast.runs import strict_json

# Where the system has no such flags (Windows) it has no such links or pipes either.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def open_plain(path: Path, *, follow: bool = False) -> FileIO:
    """Open `path` for reading without a buffer; raise OSError where it is no plain file.

    `follow`: the target of a link will do.
    """
    file = os.open(path, _FLAGS if follow else _FLAGS | _NO_LINK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(file, "rb", buffering=0)


def read_plain(path: Path) -> bytes:
    """Return what `path` or the target of a link there holds; raise OSError where that cannot be.

    That it is larger than the memory is such a case.
    """
    with open_plain(path, follow=True) as file:
        try:
            return file.readall()
        except (MemoryError, OverflowError):
            raise OSError(errno.ENOMEM, "it is larger than the memory", str(path)) from None


def peek_json(path: Path, *, most_bytes: int) -> Any:
    """Return what `path` holds, or None where it is not there, too large or not JSON."""
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                return None
            return strict_json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None
