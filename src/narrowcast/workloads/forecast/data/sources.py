"""Columns of a table, from a CSV or parquet file or a pandas or polars frame.

A source reads the columns that somebody names, as numbers or as text, and knows what to call a row
in a message: a line of a file, a row of a frame.
"""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from narrowcast.config.problems import closest, shortened, shown_path
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.plain_files import expand_path, read_plain
from narrowcast.workloads.forecast.data.dates import looks_like_date

Column: TypeAlias = npt.NDArray[Any]

DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "nat", "<na>", "?"})
"""Cells that are missing values, in lower case."""
CHUNK_ROWS = 8192
"""Rows whose cells are text at one time: a cell as a string takes six times its bytes."""
LARGEST = float(np.finfo(np.float32).max)

_OTHER_FORMATS = {
    b"ARROW1": "an Arrow or Feather file",
    b"\x89HDF": "an HDF5 file",
    b"BZh": "a bz2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"(\xb5/\xfd": "a zstd archive",
    b"\xd0\xcf\x11\xe0": "an Excel file",
    b"{": "a JSON file",
    b"[": "a JSON file",
}


class Source:
    """Named columns in memory: a pandas, polars or pyarrow table."""

    def __init__(self, label: str, names: Sequence[str], column: Callable[[str], Column]) -> None:
        self.label, self.names, self._column = label, check_names(label, names), column

    def row_label(self, row: int) -> str:
        """Return what a message calls a row."""
        return f"{self.label}, row {row} (the first is 0)"

    def first(self, name: str) -> Any:
        """Return the first value of a column; None without rows."""
        column = self._column(name)
        return column[0] if len(column) else None

    def read(self, numbers: Iterable[str], others: Iterable[str]) -> dict[str, Column]:
        """Return columns as float64, and others as they are; missing values are NaN or None."""
        columns = {name: self._numeric(name) for name in numbers}
        return columns | {name: self._column(name) for name in others}

    def _numeric(self, name: str) -> Column:
        column = self._column(name)
        if column.dtype.kind in "fiub":
            return self.check_finite(name, column.astype(np.float64))
        if column.dtype.kind in "mM":
            raise ConfigError(
                f"{self.label}: column {name!r} must have numbers, got dates. "
                "Name the column of dates with time, or leave this one out."
            )
        return self._converted(name, column, 0)

    def _converted(self, name: str, cells: Sequence[Any] | Column, start: int) -> Column:
        """Return cells as numbers, one by one; raise for the first that is none."""
        values = np.empty(len(cells))
        for row, cell in enumerate(cells):
            value = self.number(cell)
            if value is None:
                raise ConfigError(
                    f"{self.row_label(start + row)}: column {name!r} must have numbers, got "
                    f"{shortened(repr(cell))}. {self._number_hint(str(cell))}"
                )
            values[row] = value
        return self.check_finite(name, values, start)

    def number(self, cell: Any) -> float | None:
        """Return a cell as a number, NaN if it is missing, None if it is neither."""
        return number_or_none(cell)

    def _number_hint(self, cell: str) -> str:
        return "Correct the value, or name the columns to forecast with target."

    def check_finite(self, name: str, values: Column, start: int = 0) -> Column:
        """Return values that float32 can hold; raise for the first that it cannot."""
        # One comparison that is false for NaN, which is a missing value and allowed.
        large = np.abs(values) > LARGEST
        if large.any():
            row = int(large.argmax())
            raise ConfigError(
                f"{self.row_label(start + row)}: column {name!r} must be finite and below "
                f"3.4e38, got {values[row]:g}. Correct the value, or leave the cell empty and set "
                "fill."
            )
        return values


class CsvSource(Source):
    """A CSV file, read in one pass and in chunks of rows."""

    def __init__(
        self, content: bytes, label: str, *, delimiter: str | None = None, decimal: str = "."
    ) -> None:
        self.text = _decoded(content, label)
        self.decimal = decimal
        head, line = next(
            ((text, n) for n, text in enumerate(self.text.split("\n", 64), 1) if text.strip()),
            ("", 0),
        )
        if not head:
            raise ConfigError(f"{label} is empty. Give a CSV file with a header line.")
        self.delimiter = _delimiter(head, delimiter, label)
        self.quoted = '"' in self.text
        # float() takes 1_000 for a thousand; a CSV file means something else by it.
        self._underscored = "_" in self.text.partition(head)[2]
        self._header_line = line
        names = [name.strip() for name in next(csv.reader([head], delimiter=self.delimiter))]
        if any(looks_like_date(name) for name in names):
            raise ConfigError(
                f"{label}, line {line} must be a header with column names, got "
                f"{shortened(', '.join(names))}. Write a header as first line."
            )
        names = [name or f"column {place}" for place, name in enumerate(names, 1)]
        super().__init__(label, names, self._read_one)
        self._lines: Sequence[int] = ()
        self._first = next((cells for _, cells in self._rows()), None)
        if self._first is None:
            raise ConfigError(f"{label} has a header but no rows. Give a CSV file with rows.")

    def row_label(self, row: int) -> str:
        """Return what a message calls a row."""
        return f"{self.label}, line {self._lines[row]}"

    def first(self, name: str) -> Any:
        """Return the first cell of a column."""
        assert self._first is not None
        return self._first[self.names.index(name)]

    def read(self, numbers: Iterable[str], others: Iterable[str]) -> dict[str, Column]:
        """Return columns as float64, and others as arrays of text."""
        places = {name: place for place, name in enumerate(self.names)}
        numbers, others = list(numbers), list(others)
        parts: dict[str, list[Column]] = {name: [] for name in [*numbers, *others]}
        lines: list[int] = []
        self._lines = lines
        width = len(self.names)
        for numbered, cells in self._chunks():
            start = len(lines)
            lines += numbered
            for name in numbers:
                parts[name].append(self._floats(name, cells[places[name] :: width], start))
            for name in others:
                text = [cell.strip() for cell in cells[places[name] :: width]]
                parts[name].append(np.array(text, dtype=object))
        return {name: np.concatenate(columns) for name, columns in parts.items()}

    def _read_one(self, name: str) -> Column:
        return self.read((), [name])[name]

    def _floats(self, name: str, cells: list[str], start: int) -> Column:
        if self.decimal == "." and not self._underscored:
            try:
                return self.check_finite(name, np.fromiter(map(float, cells), float), start)
            except ValueError:
                pass  # one by one: some may be missing
        return self._converted(name, cells, start)

    def number(self, cell: Any) -> float | None:
        """Return a cell as a number, NaN if it is missing, None if it is neither."""
        if self.decimal == ".":
            return number_or_none(cell)
        return None if "." in cell else number_or_none(cell.replace(",", "."))

    def _number_hint(self, cell: str) -> str:
        if "," in cell and self.decimal == "." and cell.replace(",", "", 1).strip("+- ").isdigit():
            return "Write decimal=',' if the file has decimal commas."
        if self.decimal == "," and "." in cell:
            return "Write decimal='.' if the file has decimal points."
        return super()._number_hint(cell)

    def _chunks(self) -> Iterator[tuple[list[int], list[str]]]:
        """Yield line numbers and the cells of these rows, one after the other."""
        rows = self._rows()
        if self.quoted:
            while chunk := list(islice(rows, CHUNK_ROWS)):
                yield [line for line, _ in chunk], [cell for _, cells in chunk for cell in cells]
            return
        commas = len(self.names) - 1
        lines = self.text.split("\n")
        for start in range(self._header_line, len(lines), CHUNK_ROWS):
            chunk_lines = lines[start : start + CHUNK_ROWS]
            if all(line.count(self.delimiter) == commas for line in chunk_lines) and (
                commas or all(chunk_lines)
            ):
                numbered = list(range(start + 1, start + 1 + len(chunk_lines)))
                yield numbered, self.delimiter.join(chunk_lines).split(self.delimiter)
                continue
            checked = [
                (number, self._checked(number, line.split(self.delimiter)))
                for number, line in enumerate(chunk_lines, start + 1)
                if line.strip()
            ]
            yield [line for line, _ in checked], [cell for _, cells in checked for cell in cells]

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line number and the cells of each row that is not blank."""
        reader = csv.reader(io.StringIO(self.text), delimiter=self.delimiter, strict=True)
        begins, header = 1, True
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise ConfigError(
                    f"{self.label}, line {begins}: {error}. Check the quotes from this line on."
                ) from None
            if cells is None:
                return
            line, begins = begins, reader.line_num + 1
            if not any(cell.strip() for cell in cells) and len(cells) <= 1:
                continue
            if not header:
                yield line, self._checked(line, cells)
            header = False

    def _checked(self, line: int, cells: list[str]) -> list[str]:
        """Return the cells of a row; raise if they are not one per column."""
        if len(cells) != len(self.names):
            hint = (
                "A decimal comma also separates columns: write the file with decimal points, or "
                "with semicolons between columns."
                if self.delimiter == "," and len(cells) > len(self.names)
                else "Correct the line, or name what separates columns with delimiter."
            )
            raise ConfigError(
                f"{self.label}, line {line} must have {len(self.names)} columns as the header has, "
                f"got {len(cells)}. {hint}"
            )
        return cells


def open_source(source: Any, *, delimiter: str | None = None, decimal: str = ".") -> Source:
    """Return the columns of a file or a frame, not read yet.

    Args:
        source: path of a CSV or parquet file, plain, in gzip or in a zip archive
            (`data.zip` or `data.zip/folder/file.csv`), or a pandas, polars or pyarrow table.
        delimiter: what separates columns; None finds a comma, semicolon, tab or bar.
        decimal: the decimal sign, a point or a comma.

    Raises:
        ConfigError: the source is not a table.
        UnsupportedError: the file needs a package that is not installed.
    """
    if decimal not in (".", ","):
        raise ConfigError(f"decimal must be '.' or ',', got {decimal!r}.")
    if isinstance(source, str | Path):
        if not str(source).strip():
            raise ConfigError("The path of a table must not be empty. Name a CSV or parquet file.")
        path = expand_path(source)
        return _from_bytes(*_content(path), delimiter=delimiter, decimal=decimal)
    return _from_frame(source)


def number_or_none(cell: Any) -> float | None:
    """Return a cell as a number, NaN if it is missing, None if it is neither."""
    if cell is None:
        return float("nan")
    text = str(cell).strip()
    if text.lower() in MISSING:
        return float("nan")
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def check_names(label: str, names: Sequence[Any]) -> list[str]:
    """Return column names; raise if two are the same or one is no text."""
    if strange := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(
            f"{label}: column names must be text, got {shortened(repr(strange[0]))}. Rename the "
            "columns."
        )
    if double := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"{label} has several columns {double[0]!r}. Rename or remove all but one."
        )
    return list(names)


def check_columns(source: Source, names: Iterable[str], role: str) -> None:
    """Check that a table has the columns that `role` names."""
    for name in names:
        if name not in source.names:
            near = closest(name, source.names)
            hint = f"Did you mean {near!r}?" if near else "Name a column of the table."
            raise ConfigError(
                f"{source.label} has no column {name!r}, which {role} names, got "
                f"{shortened(', '.join(source.names), 200)}. {hint}"
            )


def _content(path: Path) -> tuple[bytes, str]:
    """Return the bytes of a file, or of a member of a zip archive, and what to call it."""
    archive = next((each for each in path.parents if each.suffix.lower() == ".zip"), None)
    member = ""
    if archive is not None and archive.is_file():
        path, member = archive, path.relative_to(archive).as_posix()
    label = shown_path(path)
    try:
        content = read_plain(path)
    except OSError as error:
        raise ConfigError(
            f"{label} cannot be read: {error.strerror}. Name a CSV or parquet file."
        ) from error
    try:
        if content[:4] == b"PK\x03\x04":
            content, name = _unzipped(content, member, label)
            label = f"{label}/{name}"
        elif content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, OSError, zlib.error, zipfile.BadZipFile, RuntimeError) as error:
        raise ConfigError(
            f"{label} is damaged: {shortened(str(error))}. Compress the file again."
        ) from error
    return content, label


def _unzipped(content: bytes, member: str, label: str) -> tuple[bytes, str]:
    """Return a member of an archive, or its only table."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if "xl/workbook.xml" in names:
            raise ConfigError(f"{label} is an Excel file. Save the sheet as CSV.")
        tables = [
            name
            for name in names
            if name.lower().endswith((".csv", ".tsv", ".txt", ".parquet"))
            and not name.startswith("__MACOSX")
        ]
        ends = [name for name in tables if member and f"/{name}".endswith(f"/{member}")]
        wanted = ends if member else tables
        if len(wanted) != 1:
            there = shortened(", ".join(tables) or "no table", 200)
            raise ConfigError(
                f"{label} must have one table{f' {member!r}' if member else ''}, got {there}. "
                f"Write {label}/{tables[0] if tables else 'NAME.csv'}."
            )
        return archive.read(wanted[0]), wanted[0]


def _from_bytes(content: bytes, label: str, *, delimiter: str | None, decimal: str) -> Source:
    if content[:4] == b"PAR1":
        return _from_parquet(content, label)
    for beginning, kind in _OTHER_FORMATS.items():
        if content.lstrip()[: len(beginning)] == beginning:
            raise ConfigError(f"{label} must be a CSV or parquet file, got {kind}. Convert it.")
    return CsvSource(content, label, delimiter=delimiter, decimal=decimal)


def _from_parquet(content: bytes, label: str) -> Source:
    try:
        from pyarrow import BufferReader, lib, parquet
    except ImportError:
        raise UnsupportedError(
            f"{label} is a parquet file, which needs pyarrow. Install it with "
            "pip install 'narrowcast[forecast]', or convert the file to CSV."
        ) from None
    try:
        table = parquet.read_table(BufferReader(content))
    except (lib.ArrowException, OSError) as error:
        raise ConfigError(
            f"{label} is a damaged parquet file: {shortened(str(error))}. Write it again."
        ) from error
    return _from_arrow(table, label)


def _from_arrow(table: Any, label: str) -> Source:
    return Source(
        label,
        table.column_names,
        lambda name: np.asarray(table.column(name).to_numpy(zero_copy_only=False)),
    )


def _from_frame(frame: Any) -> Source:
    """Return the columns of a frame, whose package is not imported here."""
    package, kind = type(frame).__module__.partition(".")[0], type(frame).__name__
    label = f"the {package} frame"
    match package, kind:
        case "pandas", "DataFrame":
            dated = str(getattr(frame.index, "dtype", "")).startswith(("datetime64", "period"))
            if dated and frame.index.name is None:
                frame = frame.rename_axis("date")
            if any(name is not None for name in frame.index.names):
                frame = frame.reset_index()
            names = check_names(label, list(frame.columns))
            return Source(label, names, lambda name: _pandas(frame[name]))
        case "polars", "DataFrame":
            return Source(label, frame.columns, lambda name: _polars(frame[name]))
        case "polars", "LazyFrame":
            raise ConfigError("A table must not be a lazy frame. Write frame.collect().")
        case "pyarrow", "Table":
            return _from_arrow(frame, "the pyarrow table")
    raise ConfigError(
        "A table must be a path, or a pandas, polars or pyarrow table, got a "
        f"{kind}. Write its values into a pandas frame."
    )


def _pandas(column: Any) -> Column:
    """Return a pandas column; dates with a zone become UTC unless all are midnight."""
    kind = str(column.dtype)
    if kind.startswith("datetime64[") and "," in kind:
        local = column.dt.tz_localize(None)
        dates_only = bool((local == local.dt.normalize())[local.notna()].all())
        column = local if dates_only else column.dt.tz_convert("UTC").dt.tz_localize(None)
    elif kind.startswith("period"):
        column = column.dt.to_timestamp()
    elif kind.startswith(("Int", "UInt", "Float", "boolean")):
        return np.asarray(column.to_numpy(dtype="float64", na_value=float("nan")))
    return np.asarray(column.to_numpy())


def _polars(column: Any) -> Column:
    """Return a polars column; dates with a zone become UTC unless all are midnight."""
    kind = str(column.dtype)
    if kind.startswith("Datetime") and "time_zone" in kind and "time_zone=None" not in kind:
        local = column.dt.replace_time_zone(None)
        dates_only = bool((local == local.dt.truncate("1d")).all())
        utc = column.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        column = local if dates_only else utc
    elif kind.startswith(("Categorical", "Enum")):
        column = column.cast(str)
    return np.asarray(column.to_numpy())


def _decoded(content: bytes, label: str) -> str:
    """Return text with line feeds at the ends of lines, without a byte order mark."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{label}, line {line} is not UTF-8, got byte {content[error.start]:#04x}. Save the "
            "file as UTF-8."
        ) from None
    if "\0" in text:
        raise ConfigError(f"{label} must be text, got zero bytes. Give a CSV or parquet file.")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.rstrip("\n")


def _delimiter(head: str, requested: str | None, label: str) -> str:
    counts: Mapping[str, int] = {sign: head.count(sign) for sign in DELIMITERS}
    best = max(counts, key=lambda sign: counts[sign])
    if requested is not None:
        if len(requested) != 1 or requested in '"\n':
            raise ConfigError(f"delimiter must be one character, got {requested!r}.")
        if requested not in head and counts[best]:
            raise ConfigError(
                f"{label}: the header has no {requested!r}, which delimiter names, got "
                f"{shortened(head)!r}. Write delimiter={best!r}."
            )
        return requested
    if not counts[best]:
        raise ConfigError(
            f"{label}: the header must have a column of dates and one of values, got "
            f"{shortened(head)!r}. Separate columns with a comma, or name what separates them with "
            "delimiter."
        )
    return best
