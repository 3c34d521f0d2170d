"""Forecasts without training: windows of (windows, lookback, channels) to (windows, horizon, …)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from narrowcast.errors import ConfigError

SEASONS: Mapping[str, int] = {
    "1s": 60, "1min": 60, "5min": 288, "10min": 144, "15min": 96, "30min": 48, "1h": 24,
    "1D": 7, "1B": 5, "1W": 52, "1MS": 12, "1ME": 12, "1M": 12, "3MS": 4, "3ME": 4, "3M": 4,
}  # fmt: skip
"""Rows per season by the time between rows."""


def season_length(step: str) -> int:
    """Return the usual rows per season: a day, a week or a year; 1 where none is usual."""
    return SEASONS.get(step, 1)


def repeat(windows: Tensor, horizon: int) -> Tensor:
    """Repeat the last value."""
    return windows[:, -1:].expand(-1, horizon, -1)


def seasonal_naive(windows: Tensor, horizon: int, season: int) -> Tensor:
    """Repeat the last season."""
    if not 1 <= season <= windows.shape[1]:
        raise ConfigError(
            f"season must be between 1 and the lookback of {windows.shape[1]} rows, got {season}. "
            "Write a longer lookback, or a shorter season."
        )
    places = torch.arange(horizon, device=windows.device) % season
    return windows[:, -season:].index_select(1, places)


def drift(windows: Tensor, horizon: int) -> Tensor:
    """Continue the line from the first to the last value (Hyndman and Athanasopoulos)."""
    if windows.shape[1] < 2:
        raise ConfigError("drift needs a lookback of at least 2 rows, got 1. Write a longer one.")
    slope = (windows[:, -1:] - windows[:, :1]) / (windows.shape[1] - 1)
    ahead = torch.arange(1, horizon + 1, device=windows.device, dtype=windows.dtype)
    return windows[:, -1:] + slope * ahead[:, None]


def baselines(season: int, lookback: int) -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Return the baselines that a lookback allows, by name."""
    named: dict[str, Callable[[Tensor, int], Tensor]] = {"repeat": repeat}
    if 1 < season <= lookback:
        named["seasonal naive"] = lambda windows, horizon: seasonal_naive(windows, horizon, season)
    if lookback > 1:
        named["drift"] = drift
    return named
