"""Features of GFF3, GTF and GenBank files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from narrowcast.config.problems import shortened, shown_path
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.readers.record import (
    HEAD_BYTES,
    Feature,
    Part,
    Strand,
    decode_text,
    opened,
    record_location,
)

_STRANDS: Mapping[str, Strand] = {"+": 1, "-": -1, ".": 0, "?": 0}
COLUMNS = 9


def read_features(path: Path) -> Iterator[Feature]:
    """Yield the features of a GFF3, GTF or GenBank file; a GFF line is a feature of one part."""
    number = 0
    with opened(path, lambda: record_location(path, number + 1)) as file:
        listed = not file.peek(HEAD_BYTES).lstrip().startswith(b"LOCUS ")
        for line_number, line in enumerate(file if listed else (), 1):
            if line.startswith(b"##FASTA"):
                break
            if line.startswith(b"#") or not line.strip():
                continue
            number += 1
            location = f"{record_location(path, number)} (line {line_number})"
            yield _feature(decode_text(line, location).rstrip("\r\n"), location)
    if not listed:
        for record in read_records(path):
            yield from record.features
    elif not number:
        raise ConfigError(f"{shown_path(path)} has no features. Give a file with features.")


def _feature(line: str, position: str) -> Feature:
    columns = line.split("\t")
    if len(columns) != COLUMNS:
        raise ConfigError(
            f"{position}: a GFF feature must have {COLUMNS} tab-separated columns, got "
            f"{len(columns)}."
        )
    record, _, kind, start, end, _, strand, _, attributes = columns
    if not (start.isascii() and start.isdigit() and end.isascii() and end.isdigit()):
        raise ConfigError(
            f"{position}: start and end must be whole numbers, got {shortened(start)} and "
            f"{shortened(end)}."
        )
    first, last = int(start), int(end)
    if not 1 <= first <= last:
        raise ConfigError(
            f"{position}: positions must begin at 1, the smaller first, got {first} to {last}."
        )
    if strand not in _STRANDS:
        raise ConfigError(
            f"{position}: strand must be one of {' '.join(_STRANDS)}, got {shortened(strand)!r}."
        )
    return Feature(
        kind=unquote(kind),
        parts=(Part(first - 1, last, _STRANDS[strand]),),
        record=unquote(record),
        qualifiers=_qualifiers(attributes),
    )


def _qualifiers(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return attributes of GFF3 (`a=1,2;b=3`) or GTF (`a "1"; b "3";`)."""
    results: dict[str, tuple[str, ...]] = {}
    for piece in filter(None, (each.strip() for each in text.split(";"))):
        key, equals, value = piece.partition("=")
        if equals and " " not in key:
            values = tuple(unquote(each) for each in value.split(","))
        else:
            key, _, value = piece.partition(" ")
            values = (value.strip().strip('"'),)
        results[unquote(key)] = results.get(unquote(key), ()) + values
    return results
