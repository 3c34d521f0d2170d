"""What readers hand over: a sequence with its name, its fields and the features on it."""

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
"""Forward, reverse, or not said."""


class Part(NamedTuple):
    """Letters from `start` up to, not with, `end`, counted from 0 on the forward strand."""

    start: int
    end: int
    strand: Strand


@final
@dataclass(frozen=True, kw_only=True)
class Feature:
    """A gene, an exon or anything else that lies on a sequence.

    Parts stand in the order in which they are read: of a spliced gene on the reverse strand the
    last one first. A feature across the origin of a circle is two parts.
    """

    kind: str
    parts: tuple[Part, ...]
    record: str
    """The name of the sequence it lies on."""
    qualifiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Raw(NamedTuple):
    """What a format says of one record, before any letter is looked at."""

    name: str
    letters: bytes
    fields: dict[str, Any]
    features: tuple[Feature, ...] = ()


class Record(NamedTuple):
    """One sequence of a file, cleaned."""

    name: str
    sequence: str
    number: int
    """Its place in the file, from 1."""
    file: Path
    fields: Mapping[str, Any]
    """All else that the file says of it: columns of a table, `description`, `quality`."""
    features: tuple[Feature, ...] = ()

    @property
    def location(self) -> str:
        """Where it stands, for messages."""
        return record_location(self.file, self.number)


def record_location(path: Path, number: int) -> str:
    """Return a file and the number of a record in it as messages name them."""
    return f"{_shown(path)}, record {number}"


_shown = lru_cache(maxsize=16)(shown_path)
"""Asked for at each record."""


HEAD_BYTES = 2**16
"""Looked at to know a format; also what is read at once."""
BOM = b"\xef\xbb\xbf"
"""How some editors begin a file; no part of what is in it."""

Reader: TypeAlias = "io.BufferedReader[Any]"

_PACKED = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstandard"}


@contextmanager
def opened(path: Path, location: Callable[[], str]) -> Iterator[Reader]:
    """Open a file to be read from its beginning, unpacked where it is gzip.

    What is wrong with it is a ConfigError; `place` says how far reading had come.
    """
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
    """Decode UTF-8, or refuse."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{position} is not UTF-8 text ({error.reason}). Convert it (iconv -f latin1 -t utf-8)."
        ) from error
