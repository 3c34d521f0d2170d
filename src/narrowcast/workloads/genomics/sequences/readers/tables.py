"""Rows of CSV, TSV, JSON and JSON lines tables."""

import csv
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from narrowcast.config.problems import shortened, shown_path
from narrowcast.errors import ConfigError
from narrowcast.runs.environment import host_memory_bytes
from narrowcast.workloads.genomics.sequences.readers.record import (
    decode_text,
    record_location,
)

TableFormat = Literal["csv", "tsv", "json", "jsonl"]
LONGEST_FIELD = 2**28
"""Maximum characters of a field: a human chromosome fits."""
COPIES = 8
"""Copies of a JSON file in memory while it is parsed: bytes, text and values."""


def table_format(head: bytes, path: Path) -> TableFormat:
    """Return the kind of table by its beginning."""
    beginning = head.lstrip()
    if beginning.startswith(b"["):
        return "json"
    if beginning.startswith(b"{"):
        return "jsonl"
    names = beginning.partition(b"\n")[0]
    if b"\0" in head:
        raise ConfigError(f"{shown_path(path)} is not text. Save the table as UTF-8.")
    if b";" in names and b"," not in names and b"\t" not in names:
        raise ConfigError(
            f"{shown_path(path)} seems to use ';' as its separator. Save it with commas or tabs."
        )
    return "tsv" if b"\t" in names else "csv"


def read_rows(
    file: BinaryIO,
    path: Path,
    kind: TableFormat,
    columns: Collection[str],
    settings: Mapping[str, str],
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield rows with their numbers from 1; `settings` names, for errors, those of columns."""
    match kind:
        case "json":
            rows = _json(file, path)
        case "jsonl":
            rows = _jsonl(file, path)
        case "csv" | "tsv":
            rows = _separated(file, path, "\t" if kind == "tsv" else ",")
    for number, values in enumerate(rows, 1):
        missing = [column for column in columns if column not in values]
        if missing:
            raise ConfigError(
                f"{record_location(path, number)} has no column {missing[0]}, got "
                f"{shortened(', '.join(values), 200)}. "
                f"{_instead(missing[0], values, settings.get(missing[0]))}"
            )
        yield {key: _stripped(value) for key, value in values.items()}, number


def _instead(column: str, values: Mapping[str, Any], setting: str | None) -> str:
    """Return what to write if a column is missing."""
    if setting == "sequence" and {"ref", "alt"} <= set(values):
        return "Variants need their FASTA: write data.reference, or --reference."
    if setting == "name":
        return "Name the column with --name."
    if setting is not None:
        return f"Name the column with data.{setting}, or --{setting} of a command."
    return f"Rename the column to {column}."


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _jsonl(file: BinaryIO, path: Path) -> Iterator[Mapping[str, Any]]:
    number = 0
    for line in file:
        if line.strip():
            number += 1
            location = record_location(path, number)
            yield _object(_parsed(decode_text(line, location), location), location)


def _json(file: BinaryIO, path: Path) -> Iterator[Mapping[str, Any]]:
    most = (host_memory_bytes() or sys.maxsize) // COPIES
    content = file.read(most + 1)
    where = shown_path(path)
    if len(content) > most:
        raise ConfigError(
            f"{where} is larger than {most} bytes, and JSON is parsed in memory. Write it as JSON "
            "lines, one object per line."
        )
    for number, item in enumerate(_parsed(decode_text(content, where), where), 1):
        yield _object(item, record_location(path, number))


def _parsed(text: str, position: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{position} is nested too deeply for a row.") from error
    except ValueError as error:
        raise ConfigError(
            f"{position} is not JSON: {error}. JSON lines have one object per line, JSON a list of "
            "objects."
        ) from error


def _object(value: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f'{location} must be an object. Write a row as {{"sequence": ..., "label": ...}}.'
        )
    return value


def _separated(file: BinaryIO, path: Path, sign: str) -> Iterator[Mapping[str, Any]]:
    number = 0
    lines = (decode_text(line, record_location(path, number + 1)) for line in file)
    reader = csv.reader(lines, delimiter=sign, strict=True)
    # One limit for the process; the usual one is shorter than a gene.
    csv.field_size_limit(max(LONGEST_FIELD, csv.field_size_limit()))
    names: Sequence[str] = ()
    try:
        for fields in reader:
            if not names:
                names = _header(fields, path)
            elif fields:
                number += 1
                if len(fields) != len(names):
                    raise ConfigError(
                        f"{record_location(path, number)} must have {len(names)} fields, got "
                        f"{len(fields)}. Quote fields that contain separators or line breaks, as "
                        '"...".'
                    )
                yield dict(zip(names, fields, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{record_location(path, number + 1)}: {error}.") from error


def _header(fields: Sequence[str], path: Path) -> Sequence[str]:
    names = [name.strip() for name in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not all(names):
        wrong = f"column {shortened(twice[0])} occurs twice" if twice else "a column has no name"
        index = " (with pandas, write to_csv(…, index=False))" if not names[0] else ""
        raise ConfigError(
            f"{shown_path(path)}: {wrong}. The first line of a table must name its columns{index}."
        )
    return names
