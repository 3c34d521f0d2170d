"""One writer per run folder; readers can check whether there is one."""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from pathlib import Path
from typing import final

from narrowcast.errors import CheckpointError
from narrowcast.runs.writing import explain_write_error

LOCK = ".lock"

_held: set[tuple[int, int]] = set()
"""Device and inode of every lock file that this process holds.

A POSIX record lock guards nothing within its process, and closing any descriptor of the file there
releases it, so such a file is not even opened. A forked worker has this set but not the locks; the
lock of its parent keeps it out as well.
"""
_guard = threading.Lock()


@final
class Lock:
    """A lock on a file, held until released or until the process dies.

    A POSIX record lock, not flock: a forked data worker that outlives a killed run would still hold
    a flock. If the file system has no locks, only this process is guarded against.
    """

    def __init__(self, path: Path) -> None:
        """The file is created when the lock is taken, and stays."""
        self._path = path
        self._file: int | None = None

    def __del__(self) -> None:
        """Release the lock of a run that was dropped without being closed."""
        self.release()

    def acquire(self) -> None:
        """Take the lock; raise CheckpointError if this or another process has it."""
        if self._file is not None or sys.platform == "win32":
            return
        with _guard:
            if _is_held_here(self._path):
                raise CheckpointError(
                    f"This process is already writing to {self._path.parent}. Close that run first."
                )
            self._file = self._locked()
            _held.add(_identity(os.fstat(self._file)))

    def _locked(self) -> int:
        import fcntl

        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise CheckpointError(
                f"Cannot write to {self._path.parent}: {explain_write_error(error)}."
            ) from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(file)
                raise CheckpointError(
                    f"Another process is writing to {self._path.parent}. Wait until it has ended, "
                    "or stop it."
                ) from error
        return file

    def release(self) -> None:
        if self._file is not None:
            _held.discard(_identity(os.fstat(self._file)))
            os.close(self._file)
            self._file = None


def is_held(path: Path) -> bool | None:
    """Return whether the lock is held, without taking it; None if the system cannot say."""
    if _is_held_here(path):
        return True
    layout = _FLOCK.get(sys.platform)
    if layout is None or sys.maxsize < 2**32:
        return None
    import fcntl

    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fields = {"type": fcntl.F_RDLCK, "whence": os.SEEK_SET}
        requested = struct.pack(layout[0], *(fields.get(name, 0) for name in layout[1]))
        answer = struct.unpack(layout[0], fcntl.fcntl(file, fcntl.F_GETLK, requested))
        return bool(answer[layout[1].index("type")] != fcntl.F_UNLCK)
    except OSError:
        return None
    finally:
        os.close(file)


def _is_held_here(path: Path) -> bool:
    try:
        return _identity(path.stat()) in _held
    except OSError:  # opening it says what is wrong
        return False


def _identity(result: os.stat_result) -> tuple[int, int]:
    return result.st_dev, result.st_ino


# C's struct flock on 64-bit systems; Python does not define it.
_FLOCK = {
    "linux": ("hhqqi4x", ("type", "whence", "start", "length", "pid")),
    "darwin": ("qqihh", ("start", "length", "pid", "type", "whence")),
}
