"""One writer a run folder: a second process that would continue the same run is refused."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import final

from narrowcast.errors import CheckpointError
from narrowcast.runs.writing import explain_write_error


@final
class Lock:
    """A lock on a file, held until released or until the process dies, however it dies.

    POSIX record locks, not flock: a forked data worker that outlives a killed run would go on
    holding a flock. Where the file system has no locks, nothing is guarded.
    """

    def __init__(self, path: Path) -> None:
        """Name the lock file; it is made when the lock is taken, and stays."""
        self._path = path
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise CheckpointError where another process has it."""
        if self._file is not None or sys.platform == "win32":
            return
        import fcntl

        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self._path.parent}: {explain_write_error(error)}"
            ) from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(file)
                raise CheckpointError(
                    f"another process is writing to {self._path.parent}; wait until it has ended, "
                    "or end it"
                ) from error
        self._file = file

    def release(self) -> None:
        """Let the next process have the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
