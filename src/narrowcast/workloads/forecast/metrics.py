"""Errors of forecasts: pure functions of tensors, averaged in float64.

Missing values of `actual` are NaN and do not count. Each function returns one number, or with
`dims` the averages over these dimensions only; `dims=()` averages over none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.errors import ConfigError


def mae(forecast: Tensor, actual: Tensor, *, dims: Sequence[int] | None = None) -> Tensor:
    """Return the mean absolute error."""
    return _mean(_error(forecast, actual).abs(), dims)


def mse(forecast: Tensor, actual: Tensor, *, dims: Sequence[int] | None = None) -> Tensor:
    """Return the mean squared error."""
    return _mean(_error(forecast, actual).square(), dims)


def rmse(forecast: Tensor, actual: Tensor, *, dims: Sequence[int] | None = None) -> Tensor:
    """Return the root of the mean squared error."""
    return mse(forecast, actual, dims=dims).sqrt()


def smape(forecast: Tensor, actual: Tensor, *, dims: Sequence[int] | None = None) -> Tensor:
    """Return the symmetric mean absolute percentage error of the M4 competition, 0 to 200.

    It is 0 where forecast and actual value are both 0.
    """
    error = _error(forecast, actual).abs()
    size = forecast.double().abs() + actual.double().abs()
    return 200 * _mean(torch.where(size == 0, size, error / size), dims)


def mase(
    forecast: Tensor, actual: Tensor, scale: Tensor, *, dims: Sequence[int] | None = None
) -> Tensor:
    """Return the mean absolute scaled error (Hyndman and Koehler 2006).

    Args:
        forecast: forecasts of any shape.
        actual: values of the same shape.
        scale: `mase_scale` of the training rows, in a shape that broadcasts; where it is 0, as
            for constant series, values do not count.
        dims: dimensions to average over; None averages over all.
    """
    scale = scale.double()
    error = _error(forecast, actual).abs() / torch.where(scale == 0, torch.nan, scale)
    return _mean(error, dims)


def mase_scale(rows: Tensor, season: int = 1) -> Tensor:
    """Return the mean absolute error of the seasonal naive forecast in training rows.

    Args:
        rows: (rows, channels), more than `season` rows.
        season: rows per season; 1 compares with the last value.

    Returns:
        (channels,), float64.
    """
    if len(rows) <= season:
        raise ConfigError(
            f"MASE needs more training rows than season={season}, got {len(rows)}. Write a smaller "
            "season."
        )
    rows = rows.double()
    return _mean((rows[season:] - rows[:-season]).abs(), (0,))


def quantile_loss(
    quantiles: Tensor,
    levels: Sequence[float],
    actual: Tensor,
    *,
    dims: Sequence[int] | None = None,
) -> Tensor:
    """Return the pinball loss, averaged over quantiles too.

    Args:
        quantiles: forecasts, levels in the last dimension.
        levels: the level of each, between 0 and 1.
        actual: values in the shape of `quantiles` without the last dimension.
        dims: dimensions of `actual` to average over; None averages over all.
    """
    if quantiles.shape != (*actual.shape, len(levels)):
        raise ConfigError(
            f"quantiles must have the shape {(*actual.shape, len(levels))}, got "
            f"{tuple(quantiles.shape)}. Stack the levels in the last dimension."
        )
    if not len(levels) or not all(0 < level < 1 for level in levels):
        raise ConfigError(f"levels must be between 0 and 1, got {list(levels)}.")
    level = torch.tensor(list(levels), dtype=torch.float64, device=actual.device)
    error = actual.double()[..., None] - quantiles.double()
    return _mean(torch.maximum(level * error, (level - 1) * error).mean(-1), dims)


def crps_from_quantiles(
    quantiles: Tensor,
    levels: Sequence[float],
    actual: Tensor,
    *,
    dims: Sequence[int] | None = None,
) -> Tensor:
    """Return the continuous ranked probability score, as twice the mean pinball loss.

    This is exact for levels (k - 1/2) / n of many quantiles, and an approximation for few.
    """
    return 2 * quantile_loss(quantiles, levels, actual, dims=dims)


def coverage(
    lower: Tensor, upper: Tensor, actual: Tensor, *, dims: Sequence[int] | None = None
) -> Tensor:
    """Return the share of actual values within intervals, borders included."""
    inside = ((actual >= lower) & (actual <= upper)).double()
    return _mean(torch.where(actual.isnan(), torch.nan, inside), dims)


def _error(forecast: Tensor, actual: Tensor) -> Tensor:
    if forecast.shape != actual.shape:
        raise ConfigError(
            f"forecast and actual must have one shape, got {tuple(forecast.shape)} and "
            f"{tuple(actual.shape)}."
        )
    return forecast.double() - actual.double()


def _mean(values: Tensor, dims: Sequence[int] | None) -> Tensor:
    if dims is None:
        return values.nanmean()
    return values.nanmean(tuple(dims)) if len(dims) else values
