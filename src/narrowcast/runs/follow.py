"""The records of a run as they come, read from where the last look ended.

The writer is never disturbed: no lock is taken, nothing is written. What it may do meanwhile is
append, be cut off within a line, cut the file back to a checkpoint and go on from there, or be
deleted with its folder.
"""

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
"""The most one look reads: about 16,000 steps, half a second."""
REMEMBERED_BYTES = 4096
"""How much of the last line is compared with the file at the next look."""
_KIND = b'{"kind": "'


@dataclass(frozen=True, kw_only=True)
class News:
    """What one look at the file found."""

    records: tuple[Record, ...] = ()
    afresh: bool = False
    """Whether the file is not the one read before; what it holds comes from the beginning."""
    missing: bool = False
    """Whether there is no such file now."""
    more: bool = False
    """Whether the next look will find more at once."""
    damaged: int = 0
    """Whole lines that hold no record."""
    written: float = 0.0
    """When the file was last written to, in seconds of `time.time`."""


@final
class Follower:
    """Follows one file of records."""

    def __init__(self, path: Path, *, kinds: Collection[str] = tuple(KINDS)) -> None:
        """Begin before the first line of `path`; records of other kinds are passed over."""
        self._path = path
        self._kinds = frozenset(kind.encode() for kind in kinds)
        self._offset = 0
        self._last = b""
        self._identity = (0, 0)

    def look(self) -> News:
        """Return what has been written since the last look, `LOOK_BYTES` of it at most."""
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
        """Say whether what was read is still there.

        Its size alone does not tell: between two looks a resumed run may cut the file and write
        more than it held. But the last line then differs, if only in its seconds.
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
