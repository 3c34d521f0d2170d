"""Files that somebody named, read only where they are files, and only as far as they may be long.

A pipe, a socket or a device might never end, or never begin. All that is wrong with a name or with
what it leads to is an OSError, whose `strerror` says it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 2**20
"""Read at once."""

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a disk, not a file"),
)


def path_of(text: str | Path) -> Path:
    """Return the path that `text` means; ~ is the user's folder, unless there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def status_of(path: Path) -> os.stat_result | None:
    """Return what `path` leads to, or None where nothing has that name.

    A link that leads nowhere, or in a circle, is there and cannot be read.
    """
    try:
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                raise
            return None
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file has a zero byte in its name") from error


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read its bytes; whatever else has that name is refused."""
    found = status_of(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = next((text for is_so, text in _KINDS if is_so(found.st_mode)), "it is not a file")
        raise OSError(errno.EINVAL, kind)
    # Without waiting: what was a file a moment ago may be a pipe now.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_plain(path: Path, *, most: int) -> bytearray:
    """Return what is in a file of at most `most` bytes."""
    content = bytearray()
    with open_plain(path) as file:
        too_large = os.fstat(file.fileno()).st_size > most
        while not too_large and (piece := file.read(PIECE_BYTES)):
            content += piece
            too_large = len(content) > most
    if too_large:
        raise OSError(errno.EFBIG, f"it is larger than {_size(most)}")
    return content


def _size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
