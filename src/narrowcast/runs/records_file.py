"""The file of records: lines that are appended, of which at most the last can be torn."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import final

from narrowcast.errors import CheckpointError
from narrowcast.plain_files import read_plain
from narrowcast.runs.commands import resume_command
from narrowcast.runs.lock import LOCK, Lock
from narrowcast.runs.records import CheckpointRecord, Record, from_line, to_line
from narrowcast.runs.writing import explain_write_error


@final
class RecordsFile:
    """A file of records that any process may read and one at a time may write."""

    def __init__(self, path: Path) -> None:
        """The file must exist; it is opened and locked at the first write."""
        self.path = path
        self._lock = Lock(path.with_name(LOCK))
        self._file: int | None = None

    def claim(self) -> None:
        """Take the lock; raise CheckpointError if another process has it."""
        self._lock.acquire()

    def read(self) -> list[Record]:
        """Return every record; a torn last line is left out, any other raises."""
        return [record for record, _ in self._ended_records()]

    def append(self, record: Record) -> None:
        """Append a record, which survives a kill of the process from here on."""
        line = (to_line(record) + "\n").encode()
        file = self._open()
        self._check_in_place(file)
        before = os.fstat(file).st_size
        try:
            _write_all(file, line)
        except OSError as error:
            with contextlib.suppress(OSError):  # readers leave out a torn last line
                os.ftruncate(file, before)
            raise self._cannot_write(error) from error

    def rewind(self, step: int, *, saved_bytes: int | None = None) -> list[Record]:
        """Drop what follows the checkpoint of `step`, and a torn last line; return the rest.

        A background checkpoint is recorded after later steps, so its record may be dropped too. If
        the run died before it recorded the checkpoint, the records up to `step` stay.
        """
        self._lock.acquire()
        ended = self._ended_records()
        later = next((i for i, (record, _) in enumerate(ended) if record.step > step), len(ended))
        saved = [i for i, (record, _) in enumerate(ended) if _is_checkpoint(record, step)]
        count = saved[-1] + 1 if saved else later
        if saved_bytes is not None:
            count = sum(end <= saved_bytes for _, end in ended)
            count += any(i == count for i in saved)  # its own record follows at once
        stored = ended[count - 1][1] if count else 0
        file = self._open(ended)
        try:
            # A prefix stays, so cutting is enough: one operation, and it works on a full disk.
            os.ftruncate(file, min(stored, os.fstat(file).st_size))
            os.fsync(file)
        except OSError as error:
            raise self._cannot_write(error) from error
        return [record for record, end in ended if end <= stored]

    def close(self) -> None:
        """Close the file and release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.release()

    def _open(self, ended: list[tuple[Record, int]] | None = None) -> int:
        """Return the file open and locked for writing; `ended` is its content if known."""
        if self._file is not None:
            return self._file
        self._lock.acquire()
        ended = self._ended_records() if ended is None else ended
        end = ended[-1][1] if ended else 0
        try:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._file = file
        size = os.fstat(file).st_size
        try:
            if end > size:  # a whole record, of which only the line's end is missing
                _write_all(file, b"\n")
            else:
                os.ftruncate(file, end)
        except OSError as error:
            raise self._cannot_write(error) from error
        return file

    def _check_in_place(self, file: int) -> None:
        """Raise if the open file is not at its path any more: what is written would be lost."""
        try:
            if os.path.samestat(self.path.stat(), os.fstat(file)):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a network disk that does not respond at the moment
            return
        raise CheckpointError(
            f"{self.path.parent} was moved or removed while the run was writing to it. If it still "
            "exists, resume the run there from its last checkpoint."
        )

    def _ended_records(self) -> list[tuple[Record, int]]:
        """Return every record, and the offset of the byte after its line."""
        try:
            content = read_plain(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"Cannot read {self.path}: {error.strerror}.") from error
        *lines, last = content.split(b"\n")
        matches: list[tuple[Record, int]] = []
        end = 0
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            try:
                matches.append((from_line(line.decode()), end))
            except (CheckpointError, UnicodeDecodeError) as error:
                raise CheckpointError(
                    f"{self.path} is damaged in line {number}: {error}. Restore it from a copy."
                ) from error
        try:
            matches.append((from_line(last.decode()), end + len(last) + 1))
        except (CheckpointError, UnicodeDecodeError):
            return matches  # torn by a kill or a power cut, or empty as it should be
        return matches

    def _cannot_write(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"Cannot write to {self.path}: {explain_write_error(error)}. Then run "
            f"`{resume_command(self.path.parent)}`."
        )


def _is_checkpoint(record: Record, step: int) -> bool:
    return isinstance(record, CheckpointRecord) and record.step == step


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
