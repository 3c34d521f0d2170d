"""Synthetic hourly series, drawn from the seed: daily and weekly patterns, drift and noise."""

import numpy as np
import torch

from narrowcast.workloads.forecast.data.table import SeriesTable

ROWS, SERIES = 24 * 7 * 20, 4
"""Twenty weeks of hours."""
_DAY, _WEEK = 24, 168


def made_table(seed: int) -> SeriesTable:
    """Return one aligned table of synthetic series."""
    draw = np.random.default_rng(seed)
    hours = np.arange(ROWS)[:, None]
    phase, weekly = draw.uniform(0, _DAY, SERIES), draw.uniform(0, _WEEK, SERIES)
    day = np.sin(2 * np.pi * (hours + phase) / _DAY)
    evening = 0.4 * np.sin(4 * np.pi * (hours + 2 * phase) / _DAY)
    week = 0.5 * np.sin(2 * np.pi * (hours + weekly) / _WEEK)
    drift = draw.normal(0, 0.02, (ROWS, SERIES)).cumsum(axis=0)
    noise = draw.normal(0, 0.2, (ROWS, SERIES))
    level, size = draw.uniform(20, 100, SERIES), draw.uniform(2, 20, SERIES)
    values = level + size * (day + evening + week + drift + noise)
    names = tuple(f"series {letter}" for letter in "ABCD"[:SERIES])
    start = np.datetime64("2024-01-01", "ns")
    return SeriesTable(
        names=names,
        channels=names,
        values=torch.from_numpy(values.astype(np.float32)),
        observed=torch.ones(ROWS, SERIES, dtype=torch.bool),
        offsets=(0, ROWS),
        dates=start + np.arange(ROWS) * np.timedelta64(1, "h"),
        step="1h",
        past=None,
        future=None,
        static=None,
        past_names=(),
        future_names=(),
        static_names=(),
    )
