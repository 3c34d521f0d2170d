"""FASTA and FASTQ, line by line: one record is in memory at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import WHITESPACE
from narrowcast.workloads.genomics.sequences.readers.files import decode_text
from narrowcast.workloads.genomics.sequences.readers.record import Raw, record_location

_QUALITIES = bytes(range(ord("!"), ord("~") + 1))
"""Phred 0 to 93, written as the characters from 33 on."""


def fasta(file: BinaryIO, path: Path) -> Iterator[Raw]:
    """Yield records; lines of a sequence may be of any length, blank ones too."""
    header: bytes | None = None
    letters, number = bytearray(), 0
    for line in file:
        if not line.startswith(b">"):
            letters += line
            continue
        if header is not None:
            yield _record(header, bytes(letters), record_location(path, number))
        elif letters.strip():
            raise ConfigError(f"{record_location(path, 1)}: the first line must begin with >.")
        header, letters, number = line[1:], bytearray(), number + 1
    if header is not None:
        yield _record(header, bytes(letters), record_location(path, number))


def fastq(file: BinaryIO, path: Path) -> Iterator[Raw]:
    """Yield records with their `quality` as it is written; sequence and quality may be wrapped."""
    number = 0
    lines = iter(file)
    for line in lines:
        if not line.strip():
            continue
        number += 1
        location = record_location(path, number)
        if not line.startswith(b"@"):
            raise ConfigError(
                f"{location} must begin with @, got "
                f"{decode_text(line[:20].strip(), location)!r}. The record before it has more "
                "qualities than letters, or lines are missing."
            )
        raw = _record(line[1:], b"", location)
        letters, plus = _until_plus(lines, location)
        repeated = plus[1:].strip()
        if repeated and repeated != line[1:].strip():
            raise ConfigError(
                f"{location}: the + line has the name of another record, so lines are missing."
            )
        quality = _quality(lines, len(letters), location)
        yield Raw(raw.name, letters, {**raw.fields, "quality": quality})


def _record(header: bytes, letters: bytes, position: str) -> Raw:
    text = decode_text(header.strip(), position)
    if "\r" in text:
        raise ConfigError(f"{position}: lines end with CR only. Convert the file (tr '\\r' '\\n').")
    name, *description = text.split(maxsplit=1) or [""]
    return Raw(name, letters, {"description": description[0]} if description else {})


def _until_plus(lines: Iterator[bytes], location: str) -> tuple[bytes, bytes]:
    letters = bytearray()
    for line in lines:
        if line.startswith(b"+"):
            return bytes(letters), line
        letters += line.translate(None, WHITESPACE)
    raise ConfigError(
        f"{location} is truncated: it has no + line and no qualities. Copy the file again."
    )


def _quality(lines: Iterator[bytes], length: int, location: str) -> str:
    """Return as many qualities as there are letters; a line of them may begin with @."""
    quality = bytearray()
    while len(quality) < length:
        line = next(lines, None)
        if line is None:
            raise ConfigError(
                f"{location} is truncated: {len(quality)} qualities for {length} letters. Copy the "
                "file again."
            )
        quality += line.strip(b"\r\n")
    if length == 0:
        next(lines, None)  # the blank line of qualities that an empty sequence has
    if len(quality) > length:
        raise ConfigError(
            f"{location} must have one quality per letter, got {len(quality)} for {length} letters."
        )
    if quality.translate(None, _QUALITIES):
        raise ConfigError(f"{location}: qualities must be characters from ! to ~.")
    return quality.decode("ascii")
