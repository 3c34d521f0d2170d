"""A trained forecaster without its weights, as safetensors and JSON."""

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
from narrowcast.workloads.forecast.data.table import Layout, SeriesTable
from narrowcast.workloads.forecast.heads import Head
from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.scaling import Scaling
from narrowcast.workloads.forecast.settings import ForecastData, ForecastModel, Objective

SETTINGS, HISTORY, WEIGHTS = "forecaster.json", "history.safetensors", "model.safetensors"
_TABLES = ("values", "observed", "past", "future", "static")
_SCALES = ("centre", "spread", "past", "future", "static")


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
            "time_name": table.time_name,
            "id_name": table.id_name,
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
            sections: dict[str, Any] = {
                name: kind.model_validate_json(json.dumps(info[name]))
                for name, kind in (
                    ("data", ForecastData),
                    ("model", ForecastModel),
                    ("objective", Objective),
                )
            }
            table = SeriesTable(
                names=tuple(info["names"]),
                channels=tuple(info["channels"]),
                offsets=tuple(info["offsets"]),
                dates=dates if info["numbered"] else dates.view("datetime64[ns]"),
                step=info["step"],
                time_name=info["time_name"],
                id_name=info["id_name"],
                layout=get_layout(sections["data"]),
                label="the table of the forecaster",
                **columns,
            )
            scaling = Scaling(**{name: tensors.get(f"scaling.{name}") for name in _SCALES})  # type: ignore[arg-type]
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


def get_layout(data: ForecastData) -> Layout:
    """Return what the columns of a table mean."""
    return Layout(
        time=data.time or None,
        id=data.id or None,
        target=data.target,
        past=data.past,
        future=data.future,
        static=data.static,
        calendar=data.calendar,
        fill=data.fill,
        step=data.step or None,
        date_format=data.date_format or None,
        delimiter=data.delimiter or None,
        decimal=data.decimal,
    )


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
    starts = [max(end - rows, first) for first, end in bounds(table)]
    return _selected(table, [(a, b) for a, (_, b) in zip(starts, bounds(table), strict=True)])


def without_last(table: SeriesTable, rows: int) -> SeriesTable:
    """Return every series without its last `rows` rows."""
    for index, (first, end) in enumerate(bounds(table)):
        if end - first <= rows:
            raise ConfigError(
                f"{table.series_label(index)} has {end - first:,} rows, but the windows take the "
                f"last {rows:,}. Use fewer windows, or a longer series."
            )
    return _selected(table, [(first, end - rows) for first, end in bounds(table)])


def bounds(table: SeriesTable) -> list[tuple[int, int]]:
    """Return the first row and the end of every series."""
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
