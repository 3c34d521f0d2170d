"""Rows of one local file, one after another, each with its place."""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from narrowcast.config.problems import shortened
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError
from narrowcast.plain_files import open_plain
from narrowcast.runs.environment import host_memory_bytes
from narrowcast.workloads.sft.data.settings import SUFFIXES, file_suffix

INSTALL = "narrowcast[sft]"
LONGEST_ROW = 2**28
"""Bytes of a line or a field: a row that is longer is no conversation."""
COPIES = 8
"""Of a .json that there are at once while it is parsed, in bytes, as text and as values."""
BATCH = 1024
"""Rows of a .parquet that are unpacked at once."""


class Row(NamedTuple):
    """Columns and their values, and where they stand."""

    values: Mapping[str, Any]
    location: str


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; a bad one is refused with its number, and so is a file of none."""
    suffix = file_suffix(path)
    if not suffix:
        raise ConfigError(
            f"The file must end in {', '.join(SUFFIXES)}, optionally followed by .gz, got {path}."
        )
    read = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}[suffix]
    count = 0
    try:
        with io.BufferedReader(open_plain(path, follow=True)) as plain:
            file: BinaryIO = plain
            if path.name.lower().endswith(".gz"):
                file = cast(BinaryIO, gzip.GzipFile(fileobj=plain))
            for row in read(file, path):
                count += 1
                yield row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is not a complete .gz file: {error}. Copy it again.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not count:
        raise ConfigError(f"{path} has no rows. Give a file with rows, or leave it out.")


def _jsonl(file: BinaryIO, path: Path) -> Iterator[Row]:
    number = 0
    while line := file.readline(LONGEST_ROW + 1):
        number += 1
        position = f"{path}, line {number}"
        if len(line) > LONGEST_ROW:
            raise ConfigError(
                f"{position} is longer than {LONGEST_ROW} bytes. Check that the file is JSON lines."
            )
        text = _decoded(line, position, first=number == 1)
        if text.strip():
            yield Row(_mapping(_parsed(text, position), position), position)


def _json(file: BinaryIO, path: Path) -> Iterator[Row]:
    most = (host_memory_bytes() or sys.maxsize) // COPIES
    content = file.read(most + 1)
    if len(content) > most:
        raise ConfigError(
            f"{path} is larger than {most} bytes, and a .json file is parsed in memory. Write it "
            "as .jsonl, one row per line."
        )
    if not content.strip():
        return
    value = _parsed(_decoded(content, str(path), first=True), str(path))
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise ConfigError(
            f"{path} must be a list of rows, got a JSON {_kind(value)}. Write a list, "
            f'{{"data": [...]}}, or a .jsonl with one row per line.'
        )
    for number, item in enumerate(value, 1):
        location = f"{path}, row {number}"
        yield Row(_mapping(item, location), location)


def _csv(file: BinaryIO, path: Path) -> Iterator[Row]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    # One limit for the process; the usual one is shorter than some answers.
    csv.field_size_limit(max(LONGEST_ROW, csv.field_size_limit()))
    names: list[str] = []
    try:
        for fields in reader:
            location = f"{path}, line {reader.line_num}"
            if not names:
                names = _header(fields, location)
            elif len(fields) == len(names):
                yield Row(dict(zip(names, fields, strict=True)), location)
            elif fields:
                raise ConfigError(
                    f"{location} must have {len(names)} fields, got {len(fields)}. Quote fields "
                    'that contain commas or line breaks, as "...".'
                )
    except UnicodeDecodeError as error:
        raise ConfigError(_not_utf8(f"{path}, after line {reader.line_num}", error)) from error
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error
    finally:
        text.detach()  # whoever opened the file closes it


def _header(names: list[str], location: str) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not all(names):
        wrong = f"column {shortened(twice[0])} occurs twice" if twice else "a column has no name"
        raise ConfigError(f"{location}: {wrong}. The first line of a .csv must name its columns.")
    return names


def _parquet(file: BinaryIO, path: Path) -> Iterator[Row]:
    require_modules(["pyarrow"], of=f"{path}: to read .parquet", install="pyarrow")
    import pyarrow
    from pyarrow import parquet

    number = 0
    # The format is read from its end, which a .gz has only once all of it is unpacked.
    source = io.BytesIO(file.read()) if path.name.lower().endswith(".gz") else file
    try:
        for batch in parquet.ParquetFile(source).iter_batches(batch_size=BATCH):
            for values in batch.to_pylist():
                number += 1
                yield Row(values, f"{path}, row {number}")
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} cannot be read as .parquet: {error}.") from error


def _decoded(content: bytes, location: str, *, first: bool) -> str:
    try:
        # Some editors begin a file with a byte order mark; it is no part of the text.
        return content.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(_not_utf8(location, error)) from error


def _not_utf8(location: str, error: UnicodeDecodeError) -> str:
    return f"{location} is not UTF-8 text ({error.reason}). Convert it (iconv -f latin1 -t utf-8)."


def _parsed(text: str, location: str) -> Any:
    try:
        return json.loads(text, parse_constant=_raise_constant)
    except RecursionError as error:
        raise ConfigError(f"{location} is nested too deeply for a row.") from error
    except ValueError as error:
        raise ConfigError(
            f"{location} is not JSON: {error}. A .jsonl file has one row per line, a .json file a "
            "list of rows."
        ) from error


def _raise_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _mapping(value: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{location} must be an object, got a {_kind(value)}. Write a row as "
            f'{{"instruction": ..., "response": ...}}.'
        )
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "list", str: "text", bool: "truth value", type(None): "null"}
    return kinds.get(type(value), "number")
