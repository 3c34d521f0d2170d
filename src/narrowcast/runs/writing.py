"""Files and folders that are whole or absent, whatever moment the machine stops at."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from shutil import rmtree

from narrowcast.errors import CheckpointError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a full disk, a used-up quota and a size limit are called by the system."""

MARK = ".tmp-"
"""In the name of what is being written or removed."""

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
    with _atomic_name(target) as extra:
        extra.write_bytes(content)
        sync_file(extra)


def write_text(path: Path, text: str) -> None:
    """Write a text file that outlasts a power cut."""
    path.write_text(text, encoding="utf-8")
    sync_file(path)


@contextmanager
def written_atomically(path: Path, *, hint: str) -> Iterator[Path]:
    """Give a name beside `path` to write a file or folder at; put it at `path` once it is whole.

    What was at `path` is replaced. If writing fails, `path` is as it was, nothing is left beside
    it, and a `CheckpointError` ends with `hint`. Leftovers of a process that was killed while it
    wrote `path` are removed.
    """
    try:
        with _atomic_name(path) as other:
            yield other
    except OSError as error:
        reason = explain_write_error(error)
        raise CheckpointError(f"{path} could not be written: {reason}; {hint}") from error


def remove(path: Path) -> None:
    """Remove a file, a link or a folder if it is there.

    A folder half removed never bears its own name; one that cannot be removed under another name
    is left there.
    """
    if path.is_dir() and not path.is_symlink():
        doomed = _free_name(path, "removed")
        path.rename(doomed)
        rmtree(doomed, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, *, of: str = "") -> None:
    """Remove what a process that was killed while it wrote to `folder` has left there.

    `of` is the file or folder it wrote; without it, any. What cannot be removed is in nobody's
    way: the next one is written under another name.
    """
    result = folder.iterdir() if folder.is_dir() else ()
    for path in [path for path in result if path.name.startswith(of) and MARK in path.name]:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def sync_file(path: Path) -> None:
    """Wait until the bytes of a file are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


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


def _free_name(path: Path, why: str) -> Path:
    """Return a name beside `path` that nothing bears."""
    names = (f"{path.name}{MARK}{why}{f'-{n}' if n else ''}" for n in count())
    return next(p for p in map(path.with_name, names) if not os.path.lexists(p))


@contextmanager
def _atomic_name(path: Path) -> Iterator[Path]:
    remove_leftovers(path.parent, of=f"{path.name}{MARK}")
    extra = _free_name(path, str(os.getpid()))
    try:
        yield extra
        if extra.is_dir():
            sync_folder(extra)
            remove(path)  # a rename replaces a file, but no folder that has something in it
        extra.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            remove(extra)
