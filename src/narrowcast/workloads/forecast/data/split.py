"""Rows to train, validate and test on, in order of time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, final

from narrowcast.errors import ConfigError
from narrowcast.workloads.forecast.data.table import SeriesTable

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First row and end of each series; empty where a series is too short."""

LTSF_DAYS = (360, 120, 120)
"""Twelve, four and four months of 30 days: the published split of the ETT files."""
LTSF_ROWS_PER_DAY = {"1h": 24, "15min": 96}


@final
@dataclass(frozen=True, kw_only=True)
class Split:
    """The rows that each part forecasts; a lookback may begin before them."""

    train: Ranges
    validation: Ranges
    test: Ranges
    notes: tuple[str, ...] = ()
    """Series that were left out."""


def split(
    table: SeriesTable,
    *,
    lookback: int,
    horizon: int,
    validation: float = 0.1,
    test: float = 0.2,
    short: Literal["raise", "drop"] = "raise",
) -> Split:
    """Split each series in order of time: first training, then validation, then test rows.

    Args:
        table: the series.
        lookback: rows that a model sees.
        horizon: rows that it forecasts.
        validation: share of the rows, below 1, or their number; 0 for none.
        test: share of the rows, below 1, or their number; 0 for none.
        short: whether a series without a window in each part is left out or raises.

    Raises:
        ConfigError: a series is too short, or all are.
    """
    parts: tuple[list[tuple[int, int]], ...] = ([], [], [])
    dropped = list[str]()
    for index, (start, end) in enumerate(pairwise(table.offsets)):
        length = end - start
        tested, validated = _rows(test, length, "test"), _rows(validation, length, "validation")
        trained = length - tested - validated
        problem = _problem(
            trained, validated, tested, lookback, horizon, requested=(validation, test)
        )
        if problem and short == "raise":
            raise ConfigError(
                f"{table.series_label(index)} has {length:,} rows, {problem}. Write a "
                "smaller lookback or horizon, or short=drop to leave such series out."
            )
        if problem:
            dropped.append(table.names[index])
        borders = (start, start + trained, end - tested, end) if not problem else (start,) * 4
        for part, border in zip(parts, pairwise(borders), strict=True):
            part.append(border)
    if len(dropped) == table.series:
        raise ConfigError(
            f"{table.label}: all {table.series:,} series are too short for lookback={lookback} and "
            f"horizon={horizon}, the longest has {max(table.lengths):,} rows. Write smaller ones."
        )
    notes = (f"series left out because they are too short: {len(dropped):,}",) if dropped else ()
    train, validated_rows, tested_rows = (tuple(part) for part in parts)
    return Split(train=train, validation=validated_rows, test=tested_rows, notes=notes)


def ltsf_split(table: SeriesTable) -> Split:
    """Return the published split of ETTh and ETTm files: 12, 4 and 4 months, the rest unused."""
    if table.step not in LTSF_ROWS_PER_DAY or table.series != 1:
        raise ConfigError(
            f"{table.label} must be one wide table of hours or quarters of an hour for split=ltsf, "
            f"got {table.series:,} series with a step of {table.step}. Write split=time."
        )
    train, validation, test = (days * LTSF_ROWS_PER_DAY[table.step] for days in LTSF_DAYS)
    if len(table.values) < train + validation + test:
        raise ConfigError(
            f"{table.label} must have {train + validation + test:,} rows for split=ltsf, got "
            f"{len(table.values):,}. Write split=time."
        )
    return Split(
        train=((0, train),),
        validation=((train, train + validation),),
        test=((train + validation, train + validation + test),),
    )


def _rows(share: float, length: int, name: str) -> int:
    if share < 0 or (share >= 1 and share != int(share)):
        raise ConfigError(
            f"{name} must be a share below 1 or a number of rows, got {share}. Write {name}=0.2."
        )
    return int(share) if share >= 1 else round(share * length)


def _problem(
    train: int,
    validation: int,
    test: int,
    lookback: int,
    horizon: int,
    *,
    requested: tuple[float, float],
) -> str:
    """Return what a part lacks; empty where all have a window."""
    if train < lookback + horizon:
        return (
            f"of which {max(train, 0):,} are training rows, fewer than lookback={lookback} and "
            f"horizon={horizon} need"
        )
    for name, rows, share in zip(
        ("validation", "test"), (validation, test), requested, strict=True
    ):
        if share and rows < horizon:
            return f"of which {rows:,} are {name} rows, fewer than horizon={horizon}"
    return ""
