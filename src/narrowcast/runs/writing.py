"""Files and folders that are whole or absent, whatever moment the machine stops at."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from narrowcast.errors import CheckpointError

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
    with _put_in_place(target) as beside:
        beside.write_bytes(content)
        sync_file(beside)


def write_text(path: Path, text: str) -> None:
    """Write a text file that outlasts a power cut."""
    path.write_text(text, encoding="utf-8")
    sync_file(path)


@contextmanager
def written_beside(path: Path, *, hint: str) -> Iterator[Path]:
    """Give a name beside `path` to write a file or folder at; put it at `path` once it is whole.

    What was at `path` is replaced. If writing fails, `path` is as it was, nothing is left beside
    it, and a `CheckpointError` ends with `hint`. Leftovers of a process that was killed while it
    wrote `path` are removed.
    """
    try:
        with _put_in_place(path) as beside:
            yield beside
    except OSError as error:
        reason = explain_write_error(error)
        raise CheckpointError(f"{path} could not be written: {reason}; {hint}") from error


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there; a folder half removed never bears its own name."""
    if path.is_dir():
        doomed = path.with_name(f"{path.name}.tmp-removed")
        path.rename(doomed)
        rmtree(doomed)
    elif path.exists():
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


@contextmanager
def _put_in_place(path: Path) -> Iterator[Path]:
    beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        for other in path.parent.iterdir() if path.parent.is_dir() else ():
            if other.name.startswith(f"{path.name}.tmp-"):
                remove(other)
        yield beside
        if beside.is_dir():
            sync_folder(beside)
            remove(path)  # a rename replaces a file, but no folder that has something in it
        beside.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            remove(beside)
