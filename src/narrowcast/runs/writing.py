"""Atomic writes: files and folders that are complete or absent, whenever the machine stops."""

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
"""Errors of a full disk, a used-up quota and a size limit."""

MARK = ".tmp-"
"""Part of the names of unfinished files."""

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "your disk quota is used up; free some space",
    errno.EFBIG: "the file would exceed the size limit; raise it (ulimit -f)",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "permission denied",
    errno.ENOTDIR: "a file is in its place",
}


def replace_file(target: Path, content: bytes) -> None:
    """Replace the content of `target` atomically; an OSError leaves it unchanged."""
    with _atomic_name(target) as extra:
        extra.write_bytes(content)
        sync_file(extra)


def write_text(path: Path, text: str) -> None:
    """Write and sync a text file."""
    path.write_text(text, encoding="utf-8")
    sync_file(path)


@contextmanager
def written_atomically(path: Path, *, hint: str) -> Iterator[Path]:
    """Yield a name to write a file or folder at, and rename it to `path` once it is complete."""
    try:
        with _atomic_name(path) as other:
            yield other
    except OSError as error:
        reason = explain_write_error(error)
        raise CheckpointError(f"Cannot write {path}: {reason}; {hint}.") from error


def remove(path: Path) -> None:
    """Remove a file, link or folder; a folder is renamed first, so it is never half removed."""
    if path.is_dir() and not path.is_symlink():
        doomed = _free_name(path, "removed")
        path.rename(doomed)
        rmtree(doomed, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, *, of: str = "") -> None:
    """Remove what a killed process left in `folder` while it wrote the file `of`, or any."""
    result = folder.iterdir() if folder.is_dir() else ()
    for path in [path for path in result if path.name.startswith(of) and MARK in path.name]:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut, where the system can."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def explain_write_error(error: OSError) -> str:
    """Return what stopped a write, and what to do about it if known, as text."""
    reason = _ADVICE.get(error.errno or 0)
    return reason or error.strerror or str(error)


def _free_name(path: Path, why: str) -> Path:
    """Return an unused name beside `path`."""
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
