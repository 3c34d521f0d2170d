"""Time series in memory: read from wide and long tables, checked, filled, one row per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.forecast.data.dates import (
    Dates,
    Step,
    calendar,
    infer_step,
    looks_like_date,
    parse_dates,
    shown_date,
)
from narrowcast.workloads.forecast.data.sources import Column, Source, check_columns, open_source

Fill: TypeAlias = Literal["raise", "forward", "interpolate", "zero"]
TIME_NAMES = ("ds", "date", "datetime", "timestamp", "time")
SERIES_NAME, TARGET_NAME = "unique_id", "y"
MOST_CATEGORIES = 64
"""Different texts of a static column, each of which becomes a column."""
MOST_FILLED = 20
"""Rows per row read from which on a table is irregular, not incomplete."""


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the columns of a table mean, and how its cells are written."""

    time: str | None = None
    """Column of dates; None: ds, date, datetime, timestamp or time, or the first column."""
    id: str | None = None
    """Column that names the series of a row; None: unique_id if there is one."""
    target: Sequence[str] = ()
    """Columns to forecast; empty: y of a long table, all other columns of a wide one."""
    past: Sequence[str] = ()
    """Exogenous columns that are known until now."""
    future: Sequence[str] = ()
    """Exogenous columns that are known ahead."""
    static: Sequence[str] = ()
    """Columns with one value per series: numbers, or text that becomes one column per value."""
    calendar: bool = False
    """Add hour, weekday and so on to the columns that are known ahead."""
    fill: Fill = "raise"
    """What replaces missing values and missing rows."""
    step: str | None = None
    """Time between rows, such as 15min, 1h, 1D or 1MS; None: the one that most rows have."""
    date_format: str | None = None
    """Format of dates for strptime; None: ISO dates and unambiguous others."""
    delimiter: str | None = None
    """What separates columns of a CSV file; None: a comma, semicolon, tab or bar."""
    decimal: str = "."
    """The decimal sign of a CSV file, a point or a comma."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SeriesTable:
    """Time series with their dates, ready to cut windows from."""

    names: tuple[str, ...]
    """Series of a long table, columns of a wide one."""
    channels: tuple[str, ...]
    """Columns of `values`."""
    values: Tensor
    """(rows, channels), float32."""
    observed: Tensor
    """(rows, channels), false where a missing value was filled."""
    offsets: tuple[int, ...]
    """Series s is rows offsets[s] to offsets[s + 1]. A wide table is one series."""
    dates: Dates
    """(rows,), datetime64[ns], or int64 where rows are numbered."""
    step: str
    """Time between rows, such as 1h."""
    past: Tensor | None = None
    """(rows, past columns), float32."""
    future: Tensor | None = None
    """(rows, future columns), float32."""
    static: Tensor | None = None
    """(series, static columns), float32."""
    past_names: tuple[str, ...] = ()
    future_names: tuple[str, ...] = ()
    static_names: tuple[str, ...] = ()
    time_name: str = "ds"
    """Column of dates."""
    id_name: str = "unique_id"
    """Column that names the series of a long table."""
    label: str = "the table"
    """What messages call the file or frame."""
    layout: Layout = Layout()
    notes: tuple[str, ...] = ()
    """What was changed while reading: rows sorted, values filled, columns left out."""

    @property
    def series(self) -> int:
        """Number of series."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each series."""
        return tuple(b - a for a, b in pairwise(self.offsets))

    def series_label(self, index: int) -> str:
        """Return what a message calls a series."""
        if self.series == 1 and self.names == self.channels:
            return self.label
        return f"{self.label}, series {shortened(self.names[index])!r}"


def read_table(source: Any, layout: Layout | None = None) -> SeriesTable:
    """Read time series from a file or a frame.

    A table with a column `unique_id`, or the one that `layout.id` names, is long: one row per
    series and date. Any other table is wide: one row per date, one column per channel.

    Args:
        source: path of a CSV or parquet file, plain, in gzip or in a zip archive, or a pandas,
            polars or pyarrow table.
        layout: what the columns mean; by default they are recognised by their names.

    Raises:
        ConfigError: the table is not one of time series. The message names file, series and row.
        UnsupportedError: the file needs a package that is not installed.
    """
    layout = layout or Layout()
    if layout.fill not in ("raise", "forward", "interpolate", "zero"):
        raise ConfigError(f"fill must be raise, forward, interpolate or zero, got {layout.fill!r}.")
    step = Step.parse(layout.step) if layout.step is not None else None
    table = open_source(source, delimiter=layout.delimiter, decimal=layout.decimal)
    roles = _roles(table, layout)
    numbers = [*roles.target, *layout.past, *layout.future]
    columns = table.read(numbers, [*roles.keys, *layout.static])
    rows = _sorted_rows(table, columns, roles, layout)
    step = step or infer_step([rows.dates[each] for each in rows.slices])
    if step is None:
        raise ConfigError(
            f"{table.label} must have a series of at least two rows, got {len(rows.dates)} row"
            f"{'s' if len(rows.dates) > 1 else ''} in all. Add rows."
        )
    places, offsets = _regular_places(rows, step)
    dates = np.concatenate(
        [
            step.after(rows.dates[part.start], np.arange(end - start))
            for part, start, end in zip(rows.slices, offsets, offsets[1:], strict=False)
        ]
    )
    values, observed, notes = _filled(rows, places, offsets, layout.fill, numbers, columns)
    wide = roles.series is None
    split = (len(roles.target), len(roles.target) + len(layout.past))
    known = [values[:, split[1] :]] if layout.future else []
    future_names = tuple(layout.future)
    if layout.calendar:
        calendar_names, calendar_values = calendar(dates, step)
        known.append(calendar_values)
        future_names += calendar_names
    static_names, static = _static(rows, layout.static, columns)
    targets = values[:, : split[0]]
    notes = [*roles.notes, *rows.notes, *notes, *_constant(targets, offsets, rows, roles.target)]
    return SeriesTable(
        names=tuple(roles.target) if wide else rows.names,
        channels=tuple(roles.target),
        values=torch.from_numpy(np.ascontiguousarray(targets)),
        observed=torch.from_numpy(np.ascontiguousarray(observed[:, : split[0]])),
        offsets=tuple(offsets),
        dates=dates,
        step=str(step),
        past=torch.from_numpy(values[:, split[0] : split[1]].copy()) if layout.past else None,
        future=torch.from_numpy(np.concatenate(known, 1)) if known else None,
        static=torch.from_numpy(static) if layout.static else None,
        past_names=tuple(layout.past),
        future_names=future_names,
        static_names=static_names,
        time_name=roles.time,
        id_name=roles.series or "unique_id",
        label=table.label,
        layout=layout,
        notes=tuple(notes),
    )


def future_dates(table: SeriesTable, horizon: int) -> Dates:
    """Return the `horizon` dates after the last row of each series, (series, horizon)."""
    step = Step.parse(table.step)
    steps = np.arange(1, horizon + 1)
    return np.stack([step.after(table.dates[end - 1], steps) for end in table.offsets[1:]])


def read_future(source: Any, table: SeriesTable, *, horizon: int) -> Tensor:
    """Read the columns that are known ahead for the dates after a table.

    Args:
        source: a file or frame with the same columns of dates and series, and at least `horizon`
            rows after the end of each series; None if only the calendar is known ahead.
        table: what was read before.
        horizon: number of rows to forecast.

    Returns:
        (series, horizon, future columns), float32.

    Raises:
        ConfigError: dates or values are missing. The message names file, series and row.
    """
    layout, wanted = table.layout, future_dates(table, horizon)
    parts = []
    if layout.future:
        if source is None:
            raise ConfigError(
                f"The columns {', '.join(layout.future)} are known ahead, so a forecast needs a "
                "table of their future values, got none. Give one."
            )
        parts.append(_read_ahead(source, table, wanted))
    if layout.calendar:
        values = calendar(wanted.reshape(-1), Step.parse(table.step))[1]
        parts.append(values.reshape(*wanted.shape, -1))
    if not parts:
        raise ConfigError("The table has no columns that are known ahead. Leave future out.")
    return torch.from_numpy(np.concatenate(parts, -1))


def _read_ahead(source: Any, table: SeriesTable, wanted: Dates) -> Column:
    layout = table.layout
    ahead = open_source(source, delimiter=layout.delimiter, decimal=layout.decimal)
    roles = _roles(ahead, layout, targets=False)
    wide = table.names == table.channels
    if wide is not (roles.series is None):
        has = "a column of series" if wide else "no column of series"
        raise ConfigError(
            f"{ahead.label} must have the layout of {table.label}, got {has}. Use one layout."
        )
    columns = ahead.read(layout.future, roles.keys)
    rows = _sorted_rows(ahead, columns, roles, layout)
    positions = {name: position for position, name in enumerate(rows.names)}
    values = np.empty((*wanted.shape, len(layout.future)), dtype=np.float32)
    for index in range(table.series):
        name = rows.names[0] if wide else table.names[index]
        if name not in positions:
            raise ConfigError(
                f"{ahead.label} has no rows of series {name!r}. Add {wanted.shape[1]} rows."
            )
        part = rows.slices[positions[name]]
        dates = rows.dates[part]
        places = np.searchsorted(dates, wanted[index])
        there = places < len(dates)
        there[there] = dates[places[there]] == wanted[index][there]
        if not there.all():
            first = int((~there).argmax())
            raise ConfigError(
                f"{ahead.label}{'' if wide else f', series {name!r}'} has no row for "
                f"{shown_date(wanted[index][first])}, the last is {shown_date(dates[-1])}. "
                f"The columns {', '.join(layout.future)} must be known until "
                f"{shown_date(wanted[index][-1])}."
            )
        order = rows.order[part][places]
        for column, column_name in enumerate(layout.future):
            cells = columns[column_name][order]
            if np.isnan(cells).any():
                row = int(order[int(np.isnan(cells).argmax())])
                raise ConfigError(
                    f"{ahead.row_label(row)} has no value in column {column_name!r}, which must "
                    "be known ahead. Add it."
                )
            values[index, :, column] = cells
    return values


@final
@dataclass(frozen=True, kw_only=True)
class _Roles:
    time: str
    series: str | None
    target: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return [self.time] if self.series is None else [self.time, self.series]


def _roles(table: Source, layout: Layout, *, targets: bool = True) -> _Roles:
    """Return which column is the time, the series and the targets."""
    named = {"time": [layout.time] if layout.time else []}
    named["id"] = [layout.id] if layout.id else []
    named |= {"target": list(layout.target)} if targets else {}
    named |= {"past": list(layout.past)} if targets else {}
    named["future"] = list(layout.future)
    named |= {"static": list(layout.static)} if targets else {}
    role: dict[str, str] = {}
    for key, names in named.items():
        if isinstance(getattr(layout, key), str) and key not in ("time", "id"):
            raise ConfigError(
                f"{key} must be a list of columns, got {getattr(layout, key)!r}. Write "
                f"[{getattr(layout, key)!r}]."
            )
        check_columns(table, names, key)
        for name in names:
            if name in role:
                raise ConfigError(
                    f"{table.label}: column {name!r} must have one role, got {role[name]} and "
                    f"{key}. Leave it out of one."
                )
            role[name] = key
    time = layout.time or _time_column(table, role)
    role[time] = "time"
    series = layout.id
    if series is None and SERIES_NAME in table.names and SERIES_NAME not in role:
        series = SERIES_NAME
        role[series] = "id"
    rest = [name for name in table.names if name not in role]
    if not targets:
        return _Roles(time=time, series=series, target=())
    target, notes = list(layout.target), list[str]()
    if not target and series is not None:
        if TARGET_NAME not in rest:
            raise ConfigError(
                f"{table.label} has no column {TARGET_NAME!r} to forecast, got "
                f"{shortened(', '.join(rest) or 'no other column', 200)}. Name it with target."
            )
        target = [TARGET_NAME]
    elif not target:
        target = [name for name in rest if not _is_row_number(table, name)]
        if not target:
            raise ConfigError(
                f"{table.label} has no column to forecast beside {', '.join(role)}. Add one."
            )
    if unused := [name for name in rest if name not in target]:
        notes.append(
            f"columns not used: {shortened(', '.join(unused), 200)}; name them in past, future or "
            "static to use them"
        )
    return _Roles(time=time, series=series, target=tuple(target), notes=tuple(notes))


def _time_column(table: Source, role: dict[str, str]) -> str:
    by_name = {name.lower(): name for name in table.names if name not in role}
    for name in TIME_NAMES:
        if name in by_name:
            return by_name[name]
    first = table.names[0]
    if first not in role and looks_like_date(table.first(first)):
        return first
    raise ConfigError(
        f"{table.label} has no column of dates called {', '.join(TIME_NAMES)}, got "
        f"{shortened(', '.join(table.names), 200)}. Name it with time."
    )


def _is_row_number(table: Source, name: str) -> bool:
    """Return whether a column is the index that pandas writes without a name."""
    return name in ("column 1", "Unnamed: 0", "__index_level_0__") and str(table.first(name)) == "0"


@final
@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of a table by series and date."""

    table: Source
    names: tuple[str, ...]
    wide: bool
    order: Column
    """Row of the table of each sorted row."""
    dates: Dates
    slices: tuple[slice, ...]
    """The sorted rows of each series."""
    notes: tuple[str, ...]

    def label(self, index: int) -> str:
        """Return what a message adds to the name of a file for a series."""
        return "" if self.wide else f", series {shortened(self.names[index])!r}"

    def row_label(self, index: int, row: int) -> str:
        """Return what a message calls a sorted row of a series."""
        return f"{self.table.row_label(int(self.order[row]))}{self.label(index)}"


def _sorted_rows(table: Source, columns: dict[str, Column], roles: _Roles, layout: Layout) -> _Rows:
    """Sort rows by series and date; raise for a date that occurs twice."""
    dates = parse_dates(
        columns[roles.time], table.row_label, name=roles.time, date_format=layout.date_format
    )
    if not len(dates):
        raise ConfigError(f"{table.label} has columns but no rows. Give a table with rows.")
    codes = np.zeros(len(dates), dtype=np.int64)
    names: tuple[str, ...] = (table.label,)
    if roles.series is not None:
        names, codes = _codes(table, columns[roles.series], roles.series)
    order = np.lexsort((dates, codes))
    dates, sorted_codes = dates[order], codes[order]
    starts = np.searchsorted(sorted_codes, np.arange(len(names) + 1))
    slices = tuple(slice(int(a), int(b)) for a, b in pairwise(starts))
    moved = np.count_nonzero((np.diff(order) < 0) & (np.diff(sorted_codes) == 0))
    notes = (f"rows that were not in order of dates and are sorted: {moved:,}",) if moved else ()
    rows = _Rows(
        table=table, names=names, wide=roles.series is None, order=order, dates=dates,
        slices=slices, notes=notes,
    )  # fmt: skip
    same = (dates[1:] == dates[:-1]) & (sorted_codes[1:] == sorted_codes[:-1])
    if same.any():
        row = int(same.argmax())
        hint = (
            "If the table holds several series, name the column of their names with id."
            if rows.wide
            else "Remove one of them."
        )
        if dates.dtype.kind == "M" and np.count_nonzero(same) <= len(dates) // 1000:
            hint += " Where clocks are put back an hour occurs twice: write times in UTC."
        earlier = table.row_label(int(order[row])).removeprefix(f"{table.label}, ")
        raise ConfigError(
            f"{rows.row_label(int(sorted_codes[row]), row + 1)} has the date "
            f"{shown_date(dates[row])} of {earlier}, such rows in all: "
            f"{np.count_nonzero(same):,}. {hint}"
        )
    return rows


def _codes(table: Source, cells: Column, column: str) -> tuple[tuple[str, ...], Column]:
    """Return the names of series in the order of the table, and a number per row."""
    numbers: dict[str, int] = {}
    codes = np.empty(len(cells), dtype=np.int64)
    for row, cell in enumerate(cells.tolist()):
        name = "" if cell is None else str(cell).strip()
        if name in ("", "nan", "NaN", "<NA>"):
            raise ConfigError(
                f"{table.row_label(row)} has no series in column {column!r}. Name the series of "
                "each row."
            )
        codes[row] = numbers.setdefault(name, len(numbers))
    return tuple(numbers), codes


def _regular_places(rows: _Rows, step: Step) -> tuple[Column, list[int]]:
    """Return the place of each sorted row in a table without gaps, and where series begin there."""
    places = np.empty(len(rows.dates), dtype=np.int64)
    offsets = [0]
    for index, part in enumerate(rows.slices):
        dates = rows.dates[part]
        steps = step.index(dates)
        if (steps < 0).any():
            row = int((steps < 0).argmax())
            before = f" after {shown_date(dates[row - 1])}" if row else ""
            raise ConfigError(
                f"{rows.row_label(index, part.start + row)}: rows must be {step} apart as most "
                f"are, got {shown_date(dates[row])}{before}. Resample the series, or name another "
                "frequency with step."
            )
        gaps = np.diff(steps)
        if (gaps == 0).any():
            row = int((gaps == 0).argmax()) + 1
            raise ConfigError(
                f"{rows.row_label(index, part.start + row)}: rows must be {step} apart, got "
                f"{shown_date(dates[row])} after {shown_date(dates[row - 1])}. Resample "
                "the series, or name a shorter step."
            )
        length = int(steps[-1]) + 1
        if length > MOST_FILLED * (len(dates) + 50):
            row = int(gaps.argmax()) + 1
            raise ConfigError(
                f"{rows.row_label(index, part.start + row)}: the series must have most of its "
                f"rows, got {shown_date(dates[row])} after {shown_date(dates[row - 1])}, which "
                f"leaves out {int(gaps.max()) - 1:,} steps of {step}. Correct the date."
            )
        places[part] = steps + offsets[-1]
        offsets.append(offsets[-1] + length)
    return places, offsets


def _filled(
    rows: _Rows, places: Column, offsets: Sequence[int], fill: Fill, names: Sequence[str],
    columns: dict[str, Column],
) -> tuple[Column, Column, list[str]]:  # fmt: skip
    """Return values and whether they were observed, one row per step, without missing values."""
    values = np.full((offsets[-1], len(names)), np.nan, dtype=np.float32)
    for place, name in enumerate(names):
        values[places, place] = columns[name][rows.order]
    missing = np.isnan(values)
    if not missing.any():
        return values, ~missing, []
    if fill == "raise":
        raise _missing_value(rows, places, offsets, missing, names)
    count = 0
    affected = set[str]()
    for index, (start, end) in enumerate(pairwise(offsets)):
        for column in np.flatnonzero(missing[start:end].any(0)).tolist():
            gaps = missing[start:end, column]
            if gaps.all():
                raise ConfigError(
                    f"{rows.table.label}{rows.label(index)} has no value in column "
                    f"{names[column]!r}. Remove it."
                )
            series = values[start:end, column]
            if fill == "forward":
                latest = np.maximum.accumulate(np.where(gaps, -1, np.arange(len(gaps))))
                if latest[0] < 0:
                    raise ConfigError(
                        f"{rows.row_label(index, rows.slices[index].start)} has no value in column "
                        f"{names[column]!r}, and none before it to carry forward. Remove the first "
                        "rows, or write fill=interpolate."
                    )
                series[:] = series[latest]
            elif fill == "interpolate":
                there = np.flatnonzero(~gaps)
                series[gaps] = np.interp(np.flatnonzero(gaps), there, series[there])
            else:
                series[gaps] = 0
            count += int(gaps.sum())
            affected.add(names[column] if rows.wide else rows.names[index])
    what = "columns" if rows.wide else "series"
    most = shortened(", ".join(sorted(affected)), 100)
    return values, ~missing, [f"missing values filled ({fill}): {count:,}, in {what} {most}"]


def _missing_value(
    rows: _Rows, places: Column, offsets: Sequence[int], missing: Column, names: Sequence[str]
) -> ConfigError:
    """Return the error that names the first missing row or value."""
    advice = "Write fill=interpolate, forward or zero"
    absent = np.ones(offsets[-1], dtype=bool)
    absent[places] = False
    if absent.any():
        first = int(absent.argmax())
        index = int(np.searchsorted(offsets, first, side="right")) - 1
        row = int(np.searchsorted(places, first)) - 1
        return ConfigError(
            f"{rows.row_label(index, row)}: the row after {shown_date(rows.dates[row])} is "
            f"missing, got {shown_date(rows.dates[row + 1])} (missing rows in all: "
            f"{int(absent.sum()):,}). {advice}, or add the rows."
        )
    place, column = (int(each[0]) for each in np.nonzero(missing))
    index = int(np.searchsorted(offsets, place, side="right")) - 1
    row = int(np.searchsorted(places, place))
    return ConfigError(
        f"{rows.row_label(index, row)} has no value in column {names[column]!r} "
        f"(missing values in all: {int(missing.sum()):,}). {advice}, or add the values."
    )


def _static(
    rows: _Rows, names: Sequence[str], columns: dict[str, Column]
) -> tuple[tuple[str, ...], Column]:
    """Return names and values of the columns that have one value per series."""
    labels, parts = list[str](), list[Column]()
    for name in names:
        cells = [str(cell).strip() for cell in columns[name][rows.order].tolist()]
        first = [cells[part.start] for part in rows.slices]
        for index, part in enumerate(rows.slices):
            for row in range(part.start, part.stop):
                if cells[row] != first[index] or cells[row] in ("", "nan", "None", "NaN"):
                    raise ConfigError(
                        f"{rows.row_label(index, row)}: static column {name!r} must have one value "
                        f"per series, {first[index]!r} here, got {shortened(cells[row])!r}. "
                        "Correct it, or name the column in past or future."
                    )
        try:
            parts.append(np.array([[float(cell)] for cell in first], dtype=np.float32))
            labels.append(name)
        except ValueError:
            kinds = sorted(set(first))
            if len(kinds) > MOST_CATEGORIES:
                raise ConfigError(
                    f"{rows.table.label}: static column {name!r} must be numbers or at most "
                    f"{MOST_CATEGORIES} different texts, got {len(kinds):,}. Leave it out."
                ) from None
            parts.append(np.array([[each == kind for kind in kinds] for each in first], np.float32))
            labels += [f"{name}={kind}" for kind in kinds]
    return tuple(labels), np.concatenate(parts, 1) if parts else np.empty((0, 0), np.float32)


def _constant(
    values: Column, offsets: Sequence[int], rows: _Rows, channels: Sequence[str]
) -> Iterator[str]:
    """Yield a note if series never change."""
    least = np.minimum.reduceat(values, offsets[:-1])
    constant = least == np.maximum.reduceat(values, offsets[:-1])
    if constant.any():
        which = [
            channels[column] if rows.wide else rows.names[index]
            for index, column in zip(*np.nonzero(constant), strict=True)
        ]
        most = shortened(", ".join(dict.fromkeys(which)), 100)
        yield f"series that never change, so that their MASE is undefined: {len(which):,} ({most})"
