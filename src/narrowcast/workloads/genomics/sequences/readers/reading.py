"""Read records of FASTA, FASTQ, GenBank and tables, in one alphabet."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, final

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

Format = Literal["auto", "fasta", "fastq", "genbank"] | TableFormat
SURELY_BASES = 20
"""Letters from which on a sequence of A, C, G and T alone is not taken for protein."""


def read_records(
    path: Path,
    *,
    format: Format = "auto",  # noqa: A002  # the field's word, and that of every reader
    alphabet: Alphabet | None = None,
    strict: bool = False,
    column: str = "sequence",
    name: str | None = None,
) -> Iterator[Record]:
    """Yield the records of a file, plain or gzip, one after another.

    Without an `alphabet` it is guessed from the first sequence. Of a table, `column` has the
    sequence and `name` the name. Names must be unique in FASTA and GenBank; FASTQ may have pairs.
    """
    keeper = _Keeper(path, alphabet, strict=strict)
    seen: set[str] = set()
    with opened(path, lambda: record_location(path, keeper.number + 1)) as file:
        kind = _detect_format(file.peek(HEAD_BYTES), path) if format == "auto" else format
        for raw in _raw(file, path, kind, column=column, name=name):
            record = keeper.record(raw)
            if record.name and kind in ("fasta", "genbank"):
                if record.name in seen:
                    raise ConfigError(
                        f"{record.location} has the name of an earlier record, got "
                        f"{shortened(record.name)!r}. Rename one of them (seqkit rename)."
                    )
                seen.add(record.name)
            yield record
    if not keeper.number:
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


_BEGINNINGS: dict[bytes, Format] = {b">": "fasta", b"@": "fastq", b"LOCUS ": "genbank"}
_WITHOUT_SEQUENCES = {
    b"##gff-version": ("features", ", and this file as data.features"),
    b"##fileformat=VCF": ("variants", " with data.reference, or --reference of a command"),
}


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
    formats = "auto, fasta, fastq, genbank, csv, tsv, json, jsonl"
    raise ConfigError(f"format must be one of {formats}, got {kind!r}.")


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


@final
class _Keeper:
    """Cleans records; raises for those of another alphabet."""

    def __init__(self, path: Path, alphabet: Alphabet | None, *, strict: bool) -> None:
        self.number = 0
        self._path, self._alphabet, self._strict = path, alphabet, strict
        self._is_requested = alphabet is not None

    def record(self, raw: Raw) -> Record:
        """Return the next record, cleaned."""
        self.number += 1
        return Record(
            name=raw.name,
            sequence=self._clean(raw.letters),
            number=self.number,
            file=self._path,
            fields=raw.fields,
            features=raw.features,
        )

    def _clean(self, letters: bytes) -> str:
        if self._alphabet is None:
            if not letters.strip():
                return ""
            self._alphabet = guess_alphabet(letters)
        location = record_location(self._path, self.number)
        self._check_alphabet(letters, self._alphabet, location)
        return self._alphabet.clean(letters, strict=self._strict, location=location)

    def _check_alphabet(self, letters: bytes, alphabet: Alphabet, position: str) -> None:
        """Check that a sequence does not look like another alphabet."""
        if alphabet is PROTEIN:
            # Bases are letters of protein too: without this, a gene would be read as amino acids.
            suspect = _surely_bases(letters)
        else:
            # Where it is named, clean() says which letter is wrong, and U is a way to write T.
            sister = "".join(alphabet.reads_as).encode()
            suspect = not self._is_requested and (
                sister in letters.upper() or not alphabet.fits(letters)
            )
        result = guess_alphabet(letters) if suspect else alphabet
        if result is not alphabet and result.fits(letters):
            why = "was requested" if self._is_requested else "is the alphabet of earlier records"
            raise ConfigError(
                f"{position} reads as {result.name}, but {alphabet.name} {why}. Put each alphabet "
                "into its own file, or write data.alphabet."
            )


def _surely_bases(letters: bytes) -> bool:
    if letters.translate(None, b"ACGTUNacgtun" + WHITESPACE):
        return False
    dense = letters.translate(None, WHITESPACE).upper()
    return len(dense) >= SURELY_BASES and set(dense) - set(b"N") in (set(b"ACGT"), set(b"ACGU"))


_QUALITIES = bytes(range(ord("!"), ord("~") + 1))
"""Phred 0 to 93 as characters."""


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
        elif letters.strip():
            raise ConfigError(f"{record_location(path, 1)}: the first line must begin with >.")
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
