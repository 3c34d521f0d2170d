"""Forecasts from a trained network, in the units of the series."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.workloads.forecast.data.dates import Dates
from narrowcast.workloads.forecast.data.table import SeriesTable, future_dates, read_future
from narrowcast.workloads.forecast.heads import make_head
from narrowcast.workloads.forecast.intervals import conformal_radius
from narrowcast.workloads.forecast.models.network import ForecastNetwork, make_network
from narrowcast.workloads.forecast.saved import WEIGHTS, Trained, bounds, get_shape, without_last
from narrowcast.workloads.forecast.scaling import Scaling, scale_columns
from narrowcast.workloads.forecast.windows import Window

_WINDOWS = 1024
"""Windows that are forecast at once."""


@final
class Predictor:
    """A trained network in fp32, and its forecasts in the units of the series."""

    def __init__(self, folder: Path, *, device: torch.device) -> None:
        """Load the files of a saved forecaster or of a finished run."""
        self.trained, self.device = (trained := Trained.read(folder)), device
        weights = folder / WEIGHTS
        self.head = make_head(trained.objective, device=device)
        shape = get_shape(trained.table, trained.data, self.head)
        self.network: ForecastNetwork = make_network(
            trained.model, shape, self.head, seed=0, device=device
        )
        try:
            self.network.load_state_dict(load_file(weights, device=str(device)))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{weights} cannot be loaded: {error}.") from error
        self.network.eval()

    @property
    def horizon(self) -> int:
        """Rows of a forecast."""
        return self.trained.data.horizon

    def forecast(
        self, table: SeriesTable, *, future: Any = None, levels: Sequence[float] = ()
    ) -> dict[str, Any]:
        """Return the columns of a long table with forecasts after the end of each series.

        Args:
            table: The series.
            future: Table with the columns that are known ahead, if the network reads any.
            levels: Coverage of intervals in percent.
        """
        for level in levels:
            if not 0 < level < 100:
                raise ConfigError(f"levels must be percentages, got {level!r}. Write 80, not 0.8.")
        scaling = self._scaling_for(table)
        numbers = self._numbers(table, scaling, ahead=self._ahead(future, table))
        point = self.head.point(numbers)
        columns = _keys(table, future_dates(table, self.horizon))
        columns["forecast"] = _flat(_unscaled(point, scaling))
        for level in levels:
            low, high = self._interval(numbers, point, level / 100)
            columns[f"lo-{level:g}"] = _flat(_unscaled(low, scaling))
            columns[f"hi-{level:g}"] = _flat(_unscaled(high, scaling))
        return columns

    def backtest(self, table: SeriesTable, back: int) -> dict[str, Any]:
        """Return columns with forecasts from `back` rows before the end, beside what happened."""
        scaling = self._scaling_for(without_last(table, back))
        numbers = self._numbers(table, scaling, ahead=None, back=back)
        ends = np.array(table.offsets[1:]) - back
        rows = ends[:, None] + np.arange(self.horizon)
        columns = _keys(table, table.dates[rows])
        columns["cutoff"] = np.repeat(table.dates[ends - 1], rows.shape[1] * len(table.channels))
        known = torch.where(table.observed, table.values, torch.nan)[torch.from_numpy(rows)]
        columns["y"] = _flat(known.mT)
        columns["forecast"] = _flat(_unscaled(self.head.point(numbers), scaling))
        return columns

    def _scaling_for(self, table: SeriesTable) -> Scaling:
        """Return the scaling of a table's series; new ones are scaled by all their rows."""
        trained, known = self.trained, {}
        if table.channels != trained.table.channels:
            raise ConfigError(
                f"{table.label} must have the columns {', '.join(trained.table.channels)}, got "
                f"{', '.join(table.channels)}. Fit a new forecaster for other columns."
            )
        wide = table.names == table.channels
        if not wide:
            known = {name: index for index, name in enumerate(trained.table.names)}
        own = Scaling.fit(table, bounds(table), how=trained.data.scale)
        centre, spread = own.centre.clone(), own.spread.clone()
        for index in range(table.series):
            place = 0 if wide else known.get(table.names[index])
            if place is not None:
                centre[index] = trained.scaling.centre[place]
                spread[index] = trained.scaling.spread[place]
        return replace(trained.scaling, centre=centre, spread=spread)

    def _numbers(
        self, table: SeriesTable, scaling: Scaling, *, ahead: Tensor | None, back: int = 0
    ) -> Tensor:
        """Return the head's numbers for the rows after each series, less its last `back` rows.

        `ahead` has the columns known ahead (series, horizon, columns); without it they are those of
        the last `back` rows. The numbers are scaled: (series, channels, horizon, outputs), fp32.
        """
        parts = []
        with torch.no_grad():
            for first in range(0, table.series, _WINDOWS):
                chosen = range(first, min(first + _WINDOWS, table.series))
                window = self._window(table, scaling, chosen, ahead=ahead, back=back)
                parts.append(
                    self.network(window.x, window.past, window.future, window.static).cpu()
                )
        return torch.cat(parts)

    def _ahead(self, future: Any, table: SeriesTable) -> Tensor | None:
        """Return the columns known ahead of a forecast; raise if they are needed and not given."""
        if table.future is not None:
            return read_future(future, table, horizon=self.horizon)
        if future is not None:
            raise ConfigError(
                "The forecaster uses no columns that are known ahead. Leave future out, or fit "
                "with future=[…]."
            )
        return None

    def _interval(self, numbers: Tensor, point: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Return the scaled bounds of an interval of each value."""
        predicted = self.head.quantiles(numbers, [(1 - level) / 2, (1 + level) / 2])
        if predicted is not None:
            return predicted[..., 0], predicted[..., 1]
        if self.trained.residuals is None:
            raise ConfigError("Intervals need validation windows, got none. Train again.")
        radius = conformal_radius(self.trained.residuals, [level])[0]
        return point - radius, point + radius

    def _window(
        self,
        table: SeriesTable,
        scaling: Scaling,
        chosen: range,
        *,
        ahead: Tensor | None,
        back: int,
    ) -> Window:
        data = self.trained.data
        ends = torch.tensor([table.offsets[index + 1] - back for index in chosen])
        for index in chosen:
            length = table.offsets[index + 1] - table.offsets[index] - back
            if length < data.lookback:
                raise ConfigError(
                    f"{table.series_label(index)} must have at least lookback={data.lookback} rows "
                    f"before a forecast, got {length:,}. Add rows, or fit with a smaller lookback."
                )
        rows = ends[:, None] + torch.arange(-data.lookback, 0)
        series = torch.tensor(list(chosen))
        x = (table.values[rows].double() - scaling.centre[series, None]) / scaling.spread[
            series, None
        ]
        past = future = static = None
        if table.past is not None and scaling.past is not None:
            past = scale_columns(table.past[rows], scaling.past).mT.to(self.device)
        if table.future is not None and scaling.future is not None:
            if ahead is None:
                after = table.future[ends[:, None] + torch.arange(data.horizon)]
            else:
                after = ahead[series]
            both = torch.cat([table.future[rows], after], dim=1)
            future = scale_columns(both, scaling.future).mT.to(self.device)
        if table.static is not None and scaling.static is not None:
            static = scale_columns(table.static[series], scaling.static).to(self.device)
        scaled = x.float().mT.contiguous().to(self.device)
        return Window(x=scaled, y=scaled, observed=None, past=past, future=future, static=static)


def _unscaled(values: Tensor, scaling: Scaling) -> Tensor:
    """Return values (series, channels, rows) in the units of the series, float64."""
    return values.double() * scaling.spread[..., None] + scaling.centre[..., None]


def _keys(table: SeriesTable, dates: Dates) -> dict[str, Any]:
    """Return the columns that name the rows of a long table; dates are series × rows."""
    channels, wide = len(table.channels), table.names == table.channels
    names = np.repeat(np.array(table.names, dtype=object), 1 if wide else channels)
    columns = {table.id_name: np.repeat(names, dates.shape[1])}
    if channels > 1 and not wide:  # a long table with several columns to forecast
        each = np.tile(np.array(table.channels, dtype=object), table.series)
        columns["column"] = np.repeat(each, dates.shape[1])
    columns[table.time_name] = np.repeat(dates[:, None], channels, axis=1).reshape(-1)
    return columns


def _flat(values: Tensor) -> Any:
    """Return values (series, channels, rows) as one column."""
    return values.reshape(-1).numpy()
