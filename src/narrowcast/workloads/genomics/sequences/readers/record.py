"""Records and features of sequence files, and how files are opened."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias, cast, final

from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import open_plain

Strand = Literal[1, -1, 0]
"""Forward, reverse or unknown."""


HEAD_BYTES = 2**16
"""Bytes read to detect a format, and per read."""
BOM = b"\xef\xbb\xbf"
"""UTF-8 byte order mark."""
Reader: TypeAlias = "io.BufferedReader[Any]"
_PACKED = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstandard"}


class Part(NamedTuple):
    """Letters from `start` to `end`, excluded, from 0 on the forward strand."""

    start: int
    end: int
    strand: Strand


@final
@dataclass(frozen=True, kw_only=True)
class Feature:
    """A gene, exon or other feature; parts are in reading order."""

    kind: str
    parts: tuple[Part, ...]
    record: str
    """Name of its sequence."""
    qualifiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Raw(NamedTuple):
    """A record before its letters are cleaned."""

    name: str
    letters: bytes
    fields: dict[str, Any]
    features: tuple[Feature, ...] = ()


class Record(NamedTuple):
    """A cleaned sequence of a file."""

    name: str
    sequence: str
    number: int
    """From 1."""
    file: Path
    fields: Mapping[str, Any]
    """Other columns of a table, `description`, `quality`."""
    features: tuple[Feature, ...] = ()

    @property
    def location(self) -> str:
        """File and record, for messages."""
        return record_location(self.file, self.number)


def record_location(path: Path, number: int) -> str:
    """Return file and record number for messages."""
    return f"{_shown(path)}, record {number}"


_shown = lru_cache(maxsize=16)(shown_path)
"""Cached, since every record needs it."""


@contextmanager
def opened(path: Path, location: Callable[[], str]) -> Iterator[Reader]:
    """Open a plain or gzip file; errors name `location()`."""
    try:
        with io.BufferedReader(open_plain(path, follow=True), HEAD_BYTES) as plain:
            head = plain.peek(8)
            for magic, kind in _PACKED.items():
                if head.startswith(magic):
                    raise ConfigError(
                        f"{shown_path(path)} is compressed with {kind}, which is not supported. "
                        "Decompress it, or compress it with gzip."
                    )
            if not head.startswith(b"\x1f\x8b"):
                yield _after_mark(plain)
                return
            with gzip.GzipFile(fileobj=cast(BinaryIO, plain)) as packed:
                yield _after_mark(io.BufferedReader(packed, HEAD_BYTES))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{location()} cannot be decompressed: {error}. The file is truncated or damaged; copy "
            "it again."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{shown_path(path)} cannot be read: {error.strerror or error}."
        ) from error


def _after_mark(file: Reader) -> Reader:
    if file.peek(len(BOM)).startswith(BOM):
        file.read(len(BOM))
    return file


def decode_text(content: bytes, position: str) -> str:
    """Decode UTF-8, or raise."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{position} is not UTF-8 text ({error.reason}). Convert it (iconv -f latin1 -t utf-8)."
        ) from error
