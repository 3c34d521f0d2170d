"""Files opened by what is in them, plain or gzip, whatever they are called."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import open_plain

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
