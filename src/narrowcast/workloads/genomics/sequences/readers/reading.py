"""Read records of FASTA, FASTQ, GenBank and tables, in one alphabet."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from narrowcast.config.problems import shortened, shown_path
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import (
    PROTEIN,
    WHITESPACE,
    Alphabet,
    guess_alphabet,
)
from narrowcast.workloads.genomics.sequences.readers.genbank import genbank
from narrowcast.workloads.genomics.sequences.readers.record import (
    HEAD_BYTES,
    Raw,
    Reader,
    Record,
    decode_text,
    opened,
    record_location,
)
from narrowcast.workloads.genomics.sequences.readers.tables import (
    TableFormat,
    read_rows,
    table_format,
)

Format = Literal["fasta", "fastq", "genbank"] | TableFormat
SURELY_BASES = 20
"""Letters from which on a sequence of A, C, G and T alone is not taken for protein."""


_BEGINNINGS: dict[bytes, Format] = {b">": "fasta", b"@": "fastq", b"LOCUS ": "genbank"}
_WITHOUT_SEQUENCES = {
    b"##gff-version": ("features", ", and this file as data.features"),
    b"##fileformat=VCF": ("variants", " with data.reference, or --reference of a command"),
}
_QUALITIES = bytes(range(ord("!"), ord("~") + 1))
"""Phred 0 to 93 as characters."""


def read_records(
    path: Path,
    *,
    alphabet: Alphabet | None = None,
    strict: bool = False,
    column: str = "sequence",
    name: str | None = None,
) -> Iterator[Record]:
    """Yield the records of a file, plain or gzip; names must be unique in FASTA and GenBank."""
    seen: set[str] = set()
    requested = alphabet is not None
    number = 0
    with opened(path, lambda: record_location(path, number + 1)) as file:
        kind = _detect_format(file.peek(HEAD_BYTES), path)
        for number, raw in enumerate(_raw(file, path, kind, column=column, name=name), 1):
            location = record_location(path, number)
            if alphabet is None and raw.letters.strip():
                alphabet = guess_alphabet(raw.letters)
            sequence = ""
            if alphabet is not None:
                _check_alphabet(raw.letters, alphabet, location, requested=requested)
                sequence = alphabet.clean(raw.letters, strict=strict, location=location)
            if raw.name in seen:
                raise ConfigError(
                    f"{location} has the name of an earlier record, got {shortened(raw.name)!r}. "
                    "Rename one of them (seqkit rename)."
                )
            if raw.name and kind in ("fasta", "genbank"):
                seen.add(raw.name)
            yield Record(raw.name, sequence, number, path, raw.fields, raw.features)
    if not number:
        raise ConfigError(f"{shown_path(path)} has no records. Give a file with records.")


def _detect_format(head: bytes, path: Path) -> Format:
    """Return the format of a file by its beginning."""
    beginning = head.lstrip()
    for signs, kind in _BEGINNINGS.items():
        if beginning.startswith(signs):
            return kind
    for signs, (reader, setting) in _WITHOUT_SEQUENCES.items():
        if beginning.startswith(signs):
            raise ConfigError(
                f"{shown_path(path)} has {reader} but no sequences. Give the FASTA they refer "
                f"to{setting}."
            )
    return table_format(head, path)


def _raw(file: Reader, path: Path, kind: Format, *, column: str, name: str | None) -> Iterator[Raw]:
    match kind:
        case "fasta":
            return fasta(file, path)
        case "fastq":
            return fastq(file, path)
        case "csv" | "tsv" | "json" | "jsonl":
            return _of_table(file, path, kind, column=column, name=name)
        case "genbank":
            return genbank(file, path)


def _of_table(
    file: Reader, path: Path, kind: TableFormat, *, column: str, name: str | None
) -> Iterator[Raw]:
    settings = {column: "sequence"} | ({} if name is None else {name: "name"})
    for values, number in read_rows(file, path, kind, list(settings), settings):
        sequence = values[column]
        if not isinstance(sequence, str):
            raise ConfigError(
                f"{record_location(path, number)}: {column} must be text, got "
                f"{shortened(repr(sequence))}."
            )
        fields = {key: value for key, value in values.items() if key != column}
        # Bytes beyond ASCII are letters of no alphabet, and raise as such.
        yield Raw(
            "" if name is None else str(values[name]), sequence.encode("ascii", "replace"), fields
        )


def _check_alphabet(letters: bytes, alphabet: Alphabet, location: str, *, requested: bool) -> None:
    """Check that a sequence does not look like another alphabet."""
    if alphabet is PROTEIN:
        # Bases are letters of protein too: without this, a gene would be read as amino acids.
        suspect = _surely_bases(letters)
    else:
        # If it was requested, clean() says which letter is wrong, and U is a way to write T.
        sister = "".join(alphabet.reads_as).encode()
        suspect = not requested and (sister in letters.upper() or not alphabet.fits(letters))
    result = guess_alphabet(letters) if suspect else alphabet
    if result is not alphabet and result.fits(letters):
        why = "was requested" if requested else "is the alphabet of earlier records"
        raise ConfigError(
            f"{location} reads as {result.name}, but {alphabet.name} {why}. Put each alphabet "
            "into its own file, or write data.alphabet."
        )


def _surely_bases(letters: bytes) -> bool:
    if letters.translate(None, b"ACGTUNacgtun" + WHITESPACE):
        return False
    dense = letters.translate(None, WHITESPACE).upper()
    return len(dense) >= SURELY_BASES and set(dense) - set(b"N") in (set(b"ACGT"), set(b"ACGU"))


def fasta(file: BinaryIO, path: Path) -> Iterator[Raw]:
    """Yield FASTA records; sequences may be wrapped."""
    header: bytes | None = None
    letters, number = bytearray(), 0
    for line in file:
        if not line.startswith(b">"):
            letters += line
            continue
        if header is not None:
            yield _raw_record(header, bytes(letters), record_location(path, number))
        header, letters, number = line[1:], bytearray(), number + 1
    if header is not None:
        yield _raw_record(header, bytes(letters), record_location(path, number))


def fastq(file: BinaryIO, path: Path) -> Iterator[Raw]:
    """Yield FASTQ records with their `quality`; both may be wrapped."""
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
        raw = _raw_record(line[1:], b"", location)
        letters, plus = _until_plus(lines, location)
        repeated = plus[1:].strip()
        if repeated and repeated != line[1:].strip():
            raise ConfigError(
                f"{location}: the + line has the name of another record, so lines are missing."
            )
        quality = _quality(lines, len(letters), location)
        yield Raw(raw.name, letters, {**raw.fields, "quality": quality})


def _raw_record(header: bytes, letters: bytes, position: str) -> Raw:
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
    """Return one quality per letter; a line of them may begin with @."""
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
