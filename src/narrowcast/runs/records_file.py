"""The file of records: lines appended one by one, of which at most the last can be torn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from narrowcast.errors import CheckpointError
from narrowcast.runs.lock import LOCK, Lock
from narrowcast.runs.records import CheckpointRecord, Record, from_line, to_line
from narrowcast.runs.writing import explain_write_error


@final
class RecordsFile:
    """A file of records that anybody may read, and one process at a time may write."""

    def __init__(self, path: Path) -> None:
        """Name the file, which must exist; it is opened and locked when first written."""
        self.path = path
        self._lock = Lock(path.with_name(LOCK))
        self._file: int | None = None

    def claim(self) -> None:
        """Become the one that writes, or raise CheckpointError where another process is."""
        self._lock.acquire()

    def read(self) -> list[Record]:
        """Return every whole record; a torn last line is left out, any other is an error."""
        return [record for record, _ in self._ended_records()]

    def append(self, record: Record) -> None:
        """Add `record`; when this returns, it survives the death of the process."""
        line = (to_line(record) + "\n").encode()
        file = self._open()
        before = os.fstat(file).st_size
        try:
            _write_all(file, line)
        except OSError as error:
            os.ftruncate(file, before)
            raise self._cannot_write(error) from error

    def rewind(self, step: int) -> None:
        """Drop what follows the checkpoint of `step`, and a torn last line.

        Where the run died between saving the checkpoint and recording it, the records up to
        `step` stay.
        """
        ended = self._ended_records()
        saved = [
            end
            for record, end in ended
            if isinstance(record, CheckpointRecord) and record.step == step
        ]
        later = next((i for i, (record, _) in enumerate(ended) if record.step > step), len(ended))
        kept = saved[-1] if saved else ended[later - 1][1] if later else 0
        file = self._open()
        # A prefix stays, so cutting is enough: one operation, and it works on a full disk.
        os.ftruncate(file, min(kept, os.fstat(file).st_size))
        os.fsync(file)

    def close(self) -> None:
        """Let another process write."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.release()

    def _open(self) -> int:
        """Return the file open for writing, its last line whole, once this is the one writer."""
        if self._file is not None:
            return self._file
        self._lock.acquire()
        ended = self._ended_records()
        end = ended[-1][1] if ended else 0
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
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

    def _ended_records(self) -> list[tuple[Record, int]]:
        """Return every whole record, and the byte after its line."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        *lines, last = content.split(b"\n")
        found: list[tuple[Record, int]] = []
        end = 0
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            try:
                found.append((from_line(line.decode()), end))
            except (CheckpointError, UnicodeDecodeError) as error:
                raise CheckpointError(
                    f"{self.path} is damaged in line {number}: {error}; put it back from a copy"
                ) from error
        try:
            found.append((from_line(last.decode()), end + len(last) + 1))
        except (CheckpointError, UnicodeDecodeError):
            return found  # torn by a kill or a power cut, or empty as it should be
        return found

    def _cannot_write(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"cannot write to {self.path}: {explain_write_error(error)}; "
            f"then continue with `narrowcast resume {self.path.parent}`"
        )


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
