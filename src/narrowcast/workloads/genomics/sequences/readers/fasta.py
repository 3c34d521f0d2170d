"""FASTA and FASTQ, line by line: one record is in memory at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from narrowcast.errors import RecipeError
from narrowcast.workloads.genomics.sequences.alphabets import WHITESPACE
from narrowcast.workloads.genomics.sequences.readers.files import text_of
from narrowcast.workloads.genomics.sequences.readers.record import Raw, place_of

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
            yield _record(header, bytes(letters), place_of(path, number))
        elif letters.strip():
            raise RecipeError(f"{place_of(path, 1)}: there are letters before the first line of >")
        header, letters, number = line[1:], bytearray(), number + 1
    if header is not None:
        yield _record(header, bytes(letters), place_of(path, number))


def fastq(file: BinaryIO, path: Path) -> Iterator[Raw]:
    """Yield records with their `quality` as it is written; sequence and quality may be wrapped."""
    number = 0
    lines = iter(file)
    for line in lines:
        if not line.strip():
            continue
        number += 1
        place = place_of(path, number)
        if not line.startswith(b"@"):
            raise RecipeError(
                f"{place} begins with {text_of(line[:20].strip(), place)!r}, not with @; the "
                "record before it has more qualities than letters, or lines are missing"
            )
        raw = _record(line[1:], b"", place)
        letters, plus = _until_plus(lines, place)
        repeated = plus[1:].strip()
        if repeated and repeated != line[1:].strip():
            raise RecipeError(f"{place}: the line of + names another record; lines are missing")
        quality = _quality(lines, len(letters), place)
        yield Raw(raw.name, letters, {**raw.fields, "quality": quality})


def _record(header: bytes, letters: bytes, place: str) -> Raw:
    text = text_of(header.strip(), place)
    if "\r" in text:
        raise RecipeError(
            f"{place}: lines end as on old Macs, with CR only; convert it (tr '\\r' '\\n')"
        )
    name, *description = text.split(maxsplit=1) or [""]
    return Raw(name, letters, {"description": description[0]} if description else {})


def _until_plus(lines: Iterator[bytes], place: str) -> tuple[bytes, bytes]:
    letters = bytearray()
    for line in lines:
        if line.startswith(b"+"):
            return bytes(letters), line
        letters += line.translate(None, WHITESPACE)
    raise RecipeError(f"{place} is cut off: it has no line of + and no qualities; copy it again")


def _quality(lines: Iterator[bytes], length: int, place: str) -> str:
    """Return as many qualities as there are letters; a line of them may begin with @."""
    quality = bytearray()
    while len(quality) < length:
        line = next(lines, None)
        if line is None:
            raise RecipeError(
                f"{place} is cut off: {len(quality)} qualities for {length} letters; copy it again"
            )
        quality += line.strip(b"\r\n")
    if length == 0:
        next(lines, None)  # the blank line of qualities that an empty sequence has
    if len(quality) > length:
        raise RecipeError(
            f"{place}: {len(quality)} qualities for {length} letters; there is one for each letter"
        )
    if quality.translate(None, _QUALITIES):
        raise RecipeError(f"{place}: a quality is no character from ! to ~")
    return quality.decode("ascii")
