"""Writing files so that a reader, or the next run, never finds half of one."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a full disk, a used-up quota and a size limit are called by the system."""

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "your disk quota is used up; free some space",
    errno.EFBIG: "the file would be larger than is allowed here; raise the limit (ulimit -f)",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "permission denied",
    errno.ENOTDIR: "a file is in the way",
}


def replace_file(target: Path, content: bytes) -> None:
    """Make `content` the content of `target`: all of it, or none of it on an OSError."""
    beside = target.with_name(f".{target.name}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Make renames in the folder `path` survive a power cut, where the system can."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def explain_write_error(error: OSError) -> str:
    """Say in words what stopped a write, and what to do about it where that is known."""
    reason = _ADVICE.get(error.errno or 0)
    return reason or error.strerror or str(error)
