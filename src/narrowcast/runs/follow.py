"""Follows the records of a run without a lock, while they are written, cut back or deleted."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from narrowcast.errors import CheckpointError
from narrowcast.plain_files import open_plain
from narrowcast.runs.records import KINDS, Record, from_line

LOOK_BYTES = 4 * 2**20
"""Most bytes per read: about 16,000 steps, half a second."""
REMEMBERED_BYTES = 4096
"""How much of the last line is compared with the file at the next read."""
_KIND = b'{"kind": "'


@dataclass(frozen=True, kw_only=True)
class News:
    """What one read returned."""

    records: tuple[Record, ...] = ()
    afresh: bool = False
    """Whether this is another file than before; its records come from the start."""
    missing: bool = False
    """Whether the file is missing at the moment."""
    more: bool = False
    """Whether more can be read at once."""
    damaged: int = 0
    """Complete lines that are not records."""
    written: float = 0.0
    """Modification time of the file, as of `time.time`."""


@final
class Follower:
    """Follows one file of records."""

    def __init__(self, path: Path, *, kinds: Collection[str] = tuple(KINDS)) -> None:
        """Start before the first line of `path`; records of other kinds are skipped."""
        self._path = path
        self._kinds = frozenset(kind.encode() for kind in kinds)
        self._offset = 0
        self._last = b""
        self._identity = (0, 0)

    def look(self) -> News:
        """Return what was written since the last read, up to `LOOK_BYTES`."""
        try:
            with open_plain(self._path) as file:
                return self._look(file)
        except OSError:
            return News(missing=True)

    def _look(self, file: BinaryIO) -> News:
        result = os.fstat(file.fileno())
        identity = (result.st_dev, result.st_ino)
        afresh = self._offset > 0 and not self._continues(file, result.st_size, identity)
        if afresh:
            self._offset, self._last = 0, b""
        self._identity = identity
        file.seek(self._offset)
        data = file.read(LOOK_BYTES)
        end = data.rfind(b"\n") + 1
        # A line longer than a look is none of ours; its pieces are counted as damaged lines.
        end = end or (len(data) if len(data) == LOOK_BYTES else 0)
        if end:
            self._offset += end
            self._last = data[:end][-REMEMBERED_BYTES:]
        records, damaged = self._parsed(data[:end])
        return News(
            records=tuple(records),
            afresh=afresh,
            more=end > 0 and self._offset < result.st_size,
            damaged=damaged,
            written=result.st_mtime,
        )

    def _continues(self, file: BinaryIO, size: int, identity: tuple[int, int]) -> bool:
        """Return whether the part that was read is unchanged.

        A resumed run may cut the file and write more than it had, but its last line then differs.
        """
        if identity != self._identity or size < self._offset:
            return False
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last

    def _parsed(self, data: bytes) -> tuple[list[Record], int]:
        records: list[Record] = []
        damaged = 0
        for line in data.removesuffix(b"\n").split(b"\n") if data else ():
            # The kind comes first on a line, so most of those passed over need no parsing.
            kind = line[len(_KIND) :].partition(b'"')[0] if line.startswith(_KIND) else None
            if kind is not None and kind not in self._kinds:
                continue
            try:
                records.append(from_line(line.decode()))
            except (CheckpointError, UnicodeDecodeError):
                damaged += 1
        return records, damaged
