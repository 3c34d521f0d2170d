"""Opens paths from the user only if they are regular files, and limits how much is read.

A pipe, a socket or a device might never end, or never begin. All that is wrong with a name or with
what it leads to is an OSError, whose `strerror` says it.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from io import FileIO
from pathlib import Path

PIECE_BYTES = 2**16
"""Read from a pipe at once."""

# Where the system has no such flags (Windows) it has no such links or pipes either.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISLNK, "it is a link, not a file"),
    (stat.S_ISFIFO, "it is a pipe, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a disk, not a file"),
)


def expand_path(text: str | Path) -> Path:
    """Return `text` as a path; ~ is the user's folder, unless there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def stat_or_none(path: Path) -> os.stat_result | None:
    """Return the status of `path`, or None if it does not exist.

    A link that leads nowhere, or in a circle, is there and cannot be read.
    """
    try:
        return _status(path, follow=True)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise
        return None


def open_plain(path: Path, *, follow: bool = False) -> FileIO:
    """Open `path` for unbuffered reading; raise OSError if it is not a regular file.

    `follow`: the target of a link will do.
    """
    _require_file(_status(path, follow=follow), path)
    # Without waiting: what was a file a moment ago may be a pipe now.
    descriptor = os.open(path, _FLAGS if follow else _FLAGS | _NO_LINK)
    try:
        _require_file(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb", buffering=0)


def read_plain(path: Path, *, most: int = sys.maxsize) -> bytes:
    """Return what is in a file of at most `most` bytes, or in the target of a link to one.

    That it is larger than the memory is an OSError too.
    """
    with open_plain(path, follow=True) as file:
        _require_size(os.fstat(file.fileno()).st_size, most, path)
        try:
            content = file.readall()
        except (MemoryError, OverflowError):
            raise OSError(errno.ENOMEM, "it is larger than the memory", str(path)) from None
    _require_size(len(content), most, path)  # files in /proc report 0
    return content


def read_pipe(path: Path, *, most: int, seconds: float) -> bytearray:
    """Return what is written to a pipe until its end; refuse one that is silent for `seconds`."""
    content = bytearray()
    with os.fdopen(os.open(path, _FLAGS), "rb", buffering=0) as file:
        while select.select([file], [], [], seconds)[0]:
            piece = file.read(PIECE_BYTES)
            if piece == b"":
                return content
            content += piece or b""  # None: another reader was faster
            _require_size(len(content), most, path)
    raise OSError(
        errno.ETIMEDOUT, f"it is a pipe to which nobody wrote for {seconds:g} s", str(path)
    )


def _status(path: Path, *, follow: bool) -> os.stat_result:
    try:
        return path.stat(follow_symlinks=follow)
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file has a zero byte in its name") from error


def _require_file(result: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(result.st_mode):
        kind = next((text for is_so, text in _KINDS if is_so(result.st_mode)), "it is not a file")
        raise OSError(errno.EINVAL, kind, str(path))


def _require_size(count: int, most: int, path: Path) -> None:
    if count > most:
        text = f"{most / 2**20:.0f} MiB" if most >= 2**20 else f"{most / 2**10:.0f} KiB"
        raise OSError(errno.EFBIG, f"it is larger than {text}", str(path))
