"""Rows to train and validate on: local files by path or glob, datasets of the Hub, sums."""

import csv
import errno
import gzip
import io
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from narrowcast.config.files import matching
from narrowcast.config.problems import Problems, shortened, shown_path
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.plain_files import expand_path, open_plain, stat_or_none
from narrowcast.runs.environment import host_memory_bytes
from narrowcast.workloads.sft.data.settings import (
    SUFFIXES,
    SUMS,
    SftData,
    file_suffix,
    may_be_on_the_hub,
)

INSTALL = "narrowcast[sft]"
LONGEST_ROW = 2**28
"""Bytes of a line or field."""
COPIES = 8
"""Peak memory of parsing a .json file, as a multiple of its size."""
BATCH = 1024
"""Rows of a .parquet file read at once."""
VALIDATION = ("validation", "val", "dev", "valid")
"""Names of validation splits, in order of preference."""
LARGEST = 9
QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Add up {a} and {b}.",
    "Compute {a} + {b}.",
    "Tell me {a} plus {b}.",
    "{a} + {b} = ?",
    "What do {a} and {b} make?",
)
"""Ten wordings, so that a validation row is a new question about a known sum."""


class Row(NamedTuple):
    """Values by column, and their location."""

    values: Mapping[str, Any]
    location: str


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; raise with a line number for a bad row."""
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
    # A process-wide limit; the default is shorter than some answers.
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
        text.detach()  # the caller closes the file


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
    # Parquet is read from its end, so a .gz must be decompressed first.
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
        # Some editors write a byte order mark, which is not part of the text.
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


def hub_sources(name: str, config: str | None, *, key: str) -> "_Resolved":
    """Load a dataset from the Hub or the local cache; return its splits and notes."""
    requested = f"data.{key}={name} is not a file; as a dataset of the Hugging Face Hub it"
    require_modules(["datasets"], of=requested, install=INSTALL)
    import datasets

    try:
        loaded = datasets.load_dataset(name, config)
    except (ConnectionError, TimeoutError) as error:
        raise UnsupportedError(
            f"{requested} cannot be downloaded and is not in the local cache: {error}. Write a "
            "local file."
        ) from error
    except Exception as error:  # anything from the network or the disk
        raise ConfigError(
            f"{requested} cannot be loaded: {shortened(str(error), 300)}. Write the name of an "
            "existing dataset or file."
        ) from error
    return choose_splits(name, dict(loaded))


def choose_splits(name: str, splits: Mapping[str, Any]) -> "_Resolved":
    """Return the training and validation sources of a dataset, with notes."""
    if not splits:
        raise ConfigError(f"Dataset {name} has no splits. Write another dataset.")
    train = "train" if "train" in splits else next(iter(splits))
    held = [each for each in VALIDATION if each in splits and each != train][:1]

    def source(split: str) -> Source:
        rows = splits[split]
        return Source(f"{name} ({split})", lambda: _hub_rows(name, split, rows), kind="hub")

    notes = [] if train == "train" else [f"{name} has no train split; using split {train}"]
    return [source(train)], [source(each) for each in held], notes


def _hub_rows(name: str, split: str, rows: Any) -> Iterator[Row]:
    number = 0
    for number, values in enumerate(rows, 1):
        yield Row(values, f"{name} ({split}), row {number}")
    if not number:
        raise ConfigError(f"Split {split} of dataset {name} has no rows. Write another dataset.")


def sums() -> Iterator[Row]:
    """Yield every sum of two digits in every wording."""
    numbers = range(LARGEST + 1)
    requested = ((a, b, text) for a in numbers for b in numbers for text in QUESTIONS)
    for number, (a, b, text) in enumerate(requested, 1):
        question, answer = text.format(a=a, b=b), f"{a} + {b} = {a + b}"
        # For preference tuning, the rejected sum is one too many.
        pair = {"prompt": question, "chosen": answer, "rejected": f"{a} + {b} = {a + b + 1}"}
        yield Row({"question": question, "answer": answer, **pair}, f"sums, row {number}")


class Source(NamedTuple):
    """Rows of one origin and format."""

    name: str
    rows: Callable[[], Iterator[Row]]
    """Reads the rows from the start at each call."""
    file: Path | None = None
    kind: Literal["file", "hub", "made"] = "file"


class Sources(NamedTuple):
    """Training and validation sources, with notes."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    notes: tuple[str, ...]


def find_sources(data: SftData) -> Sources:
    """Resolve the data of a recipe; one error lists everything that is missing."""
    named = data.validation_sources
    existing = data.use_existing_splits and not named
    train, validation, notes = _resolve(data, data.sources, key="path", existing=existing)
    if named:
        validation, _, more = _resolve(data, named, key="validation_path", existing=False)
        notes += more
    from_hub = any(source.kind == "hub" for source in (*train, *validation))
    if data.dataset_config_name is not None and not from_hub:
        raise ConfigError(
            f"data.dataset_config_name={data.dataset_config_name} is only for datasets of the Hub; "
            "files have no configurations. Leave it out."
        )
    return Sources(tuple(train), tuple(validation), tuple(notes))


_Resolved = tuple[list[Source], list[Source], list[str]]


def _resolve(data: SftData, names: Sequence[str], *, key: str, existing: bool) -> _Resolved:
    problems, files, hub = Problems(), list[Path](), list[str]()
    for name in names:
        if name == SUMS:
            continue
        paths = match_files(name, problems)
        files += paths or ()
        if paths is None and may_be_on_the_hub(name):
            hub.append(name)
        elif paths is None:
            problems.add(f"{shown_path(name)}: no such file")
    if problems:
        raise ConfigError(
            "\n".join(f"data.{key}: {line}" for line in problems.lines())
            + f"\nWrite data.{key}=FILE, a path or glob of .json, .jsonl, .csv or .parquet, or the "
            "name of a dataset on the Hugging Face Hub."
        )
    train, validation, notes = _by_name(list(dict.fromkeys(files)), existing=existing)
    twice = [path for path, count in Counter(files).items() if count > 1]
    notes += [f"{path} is listed more than once and read once" for path in twice]
    train += [Source(SUMS, sums, kind="made")] * (SUMS in names)
    for name in hub:
        split, held, more = hub_sources(name, data.dataset_config_name, key=key)
        train += split
        validation += held if existing else []
        notes += more
    return train, validation, notes


def _by_name(files: list[Path], *, existing: bool) -> _Resolved:
    """Split off validation and test files by their names."""
    terms = {path: set(re.split(r"[^a-z]+", path.name.lower())) for path in files}
    held = [path for path in files if terms[path] & set(VALIDATION)]
    test = [path for path in files if "test" in terms[path] and path not in held]
    if not existing or len(held) + len(test) == len(files):
        held, test = [], []
    notes = [f"{path} is used for validation because of its name" for path in held]
    notes += [f"{path} is not used: its name marks it as test data" for path in test]
    train = [_make_source(path) for path in files if path not in held and path not in test]
    return train, [_make_source(path) for path in held], notes


def _make_source(path: Path) -> Source:
    return Source(str(path), lambda: read_rows(path), path)


def match_files(name: str, problems: Problems, *, example: str = "*.jsonl") -> list[Path] | None:
    """Return the files of a path or glob, None if nothing matches; add problems."""
    path, shown = expand_path(name), shown_path(name)
    try:
        # An existing path is taken literally, even if it contains * or [.
        if stat_or_none(path) is None:
            return matching(path) or None
        open_plain(path, follow=True).close()
    except OSError as error:
        inside = f"; write {shown}/{example} for the files in it" if path.is_dir() else ""
        reason = error.strerror or errno.errorcode.get(error.errno or 0, "unknown")
        problems.add(f"{shown} cannot be read: {reason}{inside}")
        return []
    except ValueError as error:  # ** next to other characters
        problems.add(f"{shown}: {error}")
        return []
    return [path]
