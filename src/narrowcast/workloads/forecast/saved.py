"""A trained forecaster as files, safetensors and JSON, and forecasts from it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.runs.writing import written_atomically
from narrowcast.workloads.forecast.data.table import SeriesTable
from narrowcast.workloads.forecast.heads import Head, make_head
from narrowcast.workloads.forecast.models.network import ForecastNetwork, make_network
from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.scaling import Scaling, scale_columns
from narrowcast.workloads.forecast.settings import ForecastData, ForecastModel, Objective
from narrowcast.workloads.forecast.windows import Window

SETTINGS, HISTORY, WEIGHTS = "forecaster.json", "history.safetensors", "model.safetensors"
_TABLES = ("values", "observed", "past", "future", "static")
_SCALES = ("centre", "spread", "past", "future", "static")
_WINDOWS = 1024
"""Windows that are forecast at once."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """Everything a forecast needs except the weights."""

    data: ForecastData
    model: ForecastModel
    objective: Objective
    table: SeriesTable
    """The last rows of every series."""
    scaling: Scaling
    residuals: Tensor | None = None
    """Scaled errors of the point forecast on validation windows (windows, channels, horizon)."""

    def write(self, folder: Path) -> None:
        """Write everything except the weights."""
        table = self.table
        info = {
            "version": 1,
            "data": self.data.model_dump(mode="json"),
            "model": self.model.model_dump(mode="json"),
            "objective": self.objective.model_dump(mode="json"),
            "names": table.names,
            "channels": table.channels,
            "offsets": table.offsets,
            "step": table.step,
            "numbered": table.dates.dtype.kind != "M",
            **{f"{kind}_names": getattr(table, f"{kind}_names") for kind in _TABLES[2:]},
        }
        tensors = {f"table.{name}": getattr(table, name) for name in _TABLES}
        tensors |= {f"scaling.{name}": getattr(self.scaling, name) for name in _SCALES}
        tensors["dates"] = torch.from_numpy(table.dates.view(np.int64).copy())
        tensors["residuals"] = self.residuals
        present = {name: each.contiguous() for name, each in tensors.items() if each is not None}
        with written_atomically(folder / HISTORY, hint="the weights are saved") as file:
            save_file(present, file)
        with written_atomically(folder / SETTINGS, hint="the weights are saved") as file:
            file.write_text(json.dumps(info, indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Trained":
        """Read what `write` wrote; raise if it is missing or damaged."""
        if not (folder / SETTINGS).is_file():
            raise CheckpointError(
                f"{folder} has no {SETTINGS}. Name the folder of Forecaster.save(), or of a "
                "finished run of workload forecast."
            )
        try:
            info = json.loads((folder / SETTINGS).read_text())
            tensors = load_file(folder / HISTORY)
            dates = tensors["dates"].numpy()
            columns: dict[str, Any] = {name: tensors.get(f"table.{name}") for name in _TABLES}
            columns |= {f"{kind}_names": tuple(info[f"{kind}_names"]) for kind in _TABLES[2:]}
            table = SeriesTable(
                names=tuple(info["names"]),
                channels=tuple(info["channels"]),
                offsets=tuple(info["offsets"]),
                dates=dates if info["numbered"] else dates.view("datetime64[ns]"),
                step=info["step"],
                label="the table of the forecaster",
                **columns,
            )
            scaling = Scaling(**{name: tensors.get(f"scaling.{name}") for name in _SCALES})  # type: ignore[arg-type]
            sections: dict[str, Any] = {
                name: kind.model_validate_json(json.dumps(info[name]))
                for name, kind in (
                    ("data", ForecastData),
                    ("model", ForecastModel),
                    ("objective", Objective),
                )
            }
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            SafetensorError,
            ValidationError,
        ) as error:
            raise CheckpointError(f"{folder} is damaged: {error}. Save it again.") from error
        return cls(table=table, scaling=scaling, residuals=tensors.get("residuals"), **sections)


def get_shape(table: SeriesTable, data: ForecastData, head: Head) -> Shape:
    """Return the sizes of the network for a table."""
    kinds = {name: getattr(table, name) for name in ("past", "future", "static")}
    return Shape(
        lookback=data.lookback,
        horizon=data.horizon,
        outputs=head.outputs,
        **{name: 0 if columns is None else columns.shape[1] for name, columns in kinds.items()},
    )


def last_rows(table: SeriesTable, rows: int) -> SeriesTable:
    """Return the last `rows` rows of every series."""
    starts = [max(end - rows, first) for first, end in _bounds(table)]
    return _selected(table, [(a, b) for a, (_, b) in zip(starts, _bounds(table), strict=True)])


def without_last(table: SeriesTable, rows: int) -> SeriesTable:
    """Return every series without its last `rows` rows."""
    for index, (first, end) in enumerate(_bounds(table)):
        if end - first <= rows:
            raise ConfigError(
                f"{table.series_label(index)} has {end - first:,} rows, but the windows take the "
                f"last {rows:,}. Use fewer windows, or a longer series."
            )
    return _selected(table, [(first, end - rows) for first, end in _bounds(table)])


def _bounds(table: SeriesTable) -> list[tuple[int, int]]:
    return list(zip(table.offsets[:-1], table.offsets[1:], strict=True))


def _selected(table: SeriesTable, ranges: Sequence[tuple[int, int]]) -> SeriesTable:
    """Return a table with some rows of each series."""
    rows = np.concatenate([np.arange(first, end) for first, end in ranges])
    lengths = [end - first for first, end in ranges]
    index = torch.from_numpy(rows)
    return replace(
        table,
        values=table.values[index],
        observed=table.observed[index],
        dates=table.dates[rows],
        past=None if table.past is None else table.past[index],
        future=None if table.future is None else table.future[index],
        offsets=tuple(int(each) for each in np.cumsum([0, *lengths])),
    )


@final
class Predictor:
    """A trained network in fp32, and its forecasts in the units of the series."""

    def __init__(self, trained: Trained, weights: Path, *, device: torch.device) -> None:
        self.trained, self.device = trained, device
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

    def scaling_for(self, table: SeriesTable) -> Scaling:
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
        own = Scaling.fit(table, _bounds(table), how=trained.data.scale)
        centre, spread = own.centre.clone(), own.spread.clone()
        for index in range(table.series):
            place = 0 if wide else known.get(table.names[index])
            if place is not None:
                centre[index] = trained.scaling.centre[place]
                spread[index] = trained.scaling.spread[place]
        return replace(trained.scaling, centre=centre, spread=spread)

    def numbers(
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

    def unscaled(self, values: Tensor, scaling: Scaling) -> Tensor:
        """Return values (series, channels, …) in the units of the series, float64."""
        tail = (1,) * (values.ndim - 2)
        spread = scaling.spread.reshape(*scaling.spread.shape, *tail)
        return values.double() * spread + scaling.centre.reshape(spread.shape)

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
