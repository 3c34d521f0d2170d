"""Scaling of series by their training rows, and the series on the device."""

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowcast.workloads.forecast.data.table import SeriesTable
from narrowcast.workloads.forecast.windows import DeviceSeries, Ranges

Numbers = npt.NDArray[np.float64]
_IQR_OF_NORMAL = 1.3489795003921634
"""Distance of the quartiles of a normal distribution, in standard deviations."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Scaling:
    """Centre and spread of every series and channel: scaled = (value - centre) / spread."""

    centre: Tensor
    """Series × channels, float64."""
    spread: Tensor
    past: Tensor | None = None
    """Centres and spreads of exogenous columns (2, columns), float64."""
    future: Tensor | None = None
    static: Tensor | None = None

    @classmethod
    def fit(cls, table: SeriesTable, ranges: Ranges, *, how: str) -> "Scaling":
        """Return the scaling by the observed rows of `ranges`; constant series have spread 1."""
        rows = torch.cat([torch.arange(first, end) for first, end in ranges])
        known = np.where(table.observed.numpy(), table.values.double().numpy(), np.nan)
        pairs = np.stack([_measure(known[first:end], how) for first, end in ranges], axis=1)

        def exogenous(columns: Tensor | None) -> Tensor | None:
            if columns is None:
                return None
            return torch.from_numpy(np.stack(_measure(columns.double().numpy(), "standard")))

        return cls(
            centre=torch.from_numpy(pairs[0]),
            spread=torch.from_numpy(pairs[1]),
            past=exogenous(None if table.past is None else table.past[rows]),
            future=exogenous(None if table.future is None else table.future[rows]),
            static=exogenous(table.static),
        )

    def scaled(self, values: Tensor, series: Tensor) -> Tensor:
        """Return rows × channels of values, scaled, for the series of each row."""
        return ((values.double() - self.centre[series]) / self.spread[series]).float()


def scale_columns(columns: Tensor, pair: Tensor) -> Tensor:
    """Return exogenous columns, scaled by centre and spread."""
    return ((columns.double() - pair[0]) / pair[1]).float()


def _measure(values: Numbers, how: str) -> tuple[Numbers, Numbers]:
    """Return centre and spread per channel; NaN values do not count."""
    channels = values.shape[1]
    present = ~np.isnan(values).all(axis=0)
    centre, spread = np.zeros(channels), np.ones(channels)
    known = values[:, present]
    if how == "standard":
        centre[present], spread[present] = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
    elif how == "robust":
        low, middle, high = np.nanquantile(known, [0.25, 0.5, 0.75], axis=0)
        centre[present], spread[present] = middle, (high - low) / _IQR_OF_NORMAL
    # Rounding leaves a deviation of about 1e-16 of a constant series.
    flat = spread <= 1e-12 * np.maximum(np.abs(centre), 1e-12)
    return centre, np.where(flat, 1.0, spread)


def row_series(offsets: tuple[int, ...]) -> Tensor:
    """Return the series of every row."""
    lengths = np.diff(np.asarray(offsets))
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))


def on_device(
    table: SeriesTable, scaling: Scaling, *, lookback: int, horizon: int, device: torch.device
) -> DeviceSeries:
    """Return the scaled series on the device."""
    series = row_series(table.offsets)

    def rows_last(columns: Tensor | None, pair: Tensor | None) -> Tensor | None:
        if columns is None or pair is None:
            return None
        return scale_columns(columns, pair).T.contiguous().to(device)

    static = None
    if table.static is not None and scaling.static is not None:
        static = scale_columns(table.static, scaling.static).to(device)
    return DeviceSeries(
        values=scaling.scaled(table.values, series).T.contiguous().to(device),
        observed=None if bool(table.observed.all()) else table.observed.T.contiguous().to(device),
        past=rows_last(table.past, scaling.past),
        future=rows_last(table.future, scaling.future),
        static=static,
        series_of_row=None if static is None else series.to(device),
        lookback=lookback,
        horizon=horizon,
    )
