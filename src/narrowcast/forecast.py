"""Forecast time series from Python: fit, predict, intervals, cross-validation, save and load.

forecaster = Forecaster("patchtst", horizon=96).fit(frame)
print(forecaster.predict())
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from narrowcast.config.keywords import as_arguments
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware import detect_hardware
from narrowcast.runner.run import RunResult, train
from narrowcast.workloads import load_recipe
from narrowcast.workloads.forecast.data.table import (
    SeriesTable,
    read_table,
)
from narrowcast.workloads.forecast.frames import make_frame, same_kind
from narrowcast.workloads.forecast.predictor import Predictor
from narrowcast.workloads.forecast.saved import (
    WEIGHTS,
    Trained,
    get_layout,
    without_last,
)
from narrowcast.workloads.forecast.settings import FRAME, SECTIONS, ForecastData
from narrowcast.workloads.forecast.task import using_frame

__all__ = ["Forecaster"]


@final
class Forecaster:
    """A model for time series: fit it on a table, then forecast the rows after it.

    Tables are pandas, polars or pyarrow tables, or paths of CSV and parquet files. A wide table has
    a date and one column per series. A long one has the columns `unique_id`, `ds` and `y`.

    Example:
        >>> forecaster = Forecaster("nlinear", horizon=24).fit(frame)
        >>> forecaster.predict_intervals(levels=[80, 95])
    """

    def __init__(self, model: str = "nlinear", *, horizon: int, **settings: Any) -> None:
        """Describe a forecaster; nothing is read yet.

        Args:
            model: nlinear, dlinear, nhits, patchtst, itransformer or lstm.
            horizon: Rows to forecast.
            settings: Recipe settings by name, such as `lookback=336` or `head="quantile"`. Other
                sections need the full name: `**{"precision.policy": "bf16"}`.

        Raises:
            ConfigError: A setting is unknown or has a value that it cannot have.
        """
        # All rows are trained on, but for the validation rows that choose the weights.
        defaults = {"data.horizon": horizon, "data.test_share": 0.0, "data.path": FRAME}
        self._arguments = as_arguments({**defaults, **settings}, SECTIONS.by_name)
        self.recipe = f"forecast/{model}"
        self._data = load_recipe(self.recipe, self._arguments).recipe.section(ForecastData)
        self._predictor: Predictor | None = None
        self._like: str = "pandas"
        self._table: SeriesTable | None = None
        self.result: RunResult | None = None
        """Loss, metrics and findings of the last fit."""

    def __repr__(self) -> str:
        state = "fitted" if self._predictor is not None else "not fitted"
        rows = f"{self._data.lookback} rows in, {self.horizon} out"
        return f"<Forecaster {self.recipe}: {rows}; {state}>"

    @property
    def horizon(self) -> int:
        """Rows of a forecast."""
        return self._data.horizon

    def fit(
        self, table: Any, *, out: str | Path | None = None, progress: bool | None = None
    ) -> Self:
        """Train on a table. The last tenth of every series chooses the weights.

        Args:
            table: A frame, or the path of a CSV or parquet file.
            out: Run folder to keep, with report and records; None keeps none.
            progress: Whether to show progress; None shows it on a terminal and in a notebook.

        Returns:
            The forecaster itself.

        Raises:
            ConfigError: The table is not one of time series, or too short.
        """
        series = read_table(table, get_layout(self._data))
        self._fit(series, out=out, progress=progress)
        self._like = same_kind(table)
        return self

    def predict(self, table: Any = None, *, future: Any = None) -> Any:
        """Forecast the rows after a table.

        Args:
            table: A table with at least `lookback` rows of each series; None for the end of the
                fitted one.
            future: Table with the columns that are known ahead, if the forecaster uses any.

        Returns:
            A frame of the kind that was given: like a wide table, or `unique_id`, `ds` and
            `forecast` of a long one.
        """
        predictor, series = self._ready(table)
        columns = predictor.forecast(series, future=future)
        if series.names == series.channels:
            forecasts = columns["forecast"].reshape(len(series.names), self.horizon)
            dates = columns[series.time_name][: self.horizon]
            columns = {series.time_name: dates, **dict(zip(series.names, forecasts, strict=True))}
        return make_frame(columns, self._package_for(table))

    def predict_intervals(
        self, table: Any = None, *, levels: Sequence[float] = (80, 95), future: Any = None
    ) -> Any:
        """Forecast with intervals.

        The quantile and Student-t heads predict them. The point head takes the errors of each
        forecast row on the validation windows (split conformal prediction).

        Args:
            table: As for `predict`.
            levels: Coverage of each interval in percent.
            future: As for `predict`.

        Returns:
            A long frame: `unique_id`, `ds`, `forecast`, and `lo-80`, `hi-80` per level.
        """
        predictor, series = self._ready(table)
        columns = predictor.forecast(series, future=future, levels=levels)
        return make_frame(columns, self._package_for(table))

    def cross_validation(
        self,
        table: Any,
        *,
        windows: int = 3,
        step: int | None = None,
        refit: bool = False,
        progress: bool | None = None,
    ) -> Any:
        """Forecast the last rows of a table from several origins, and return them beside the truth.

        The model is trained on the rows before the first origin, or with `refit` again before each.

        Args:
            table: A frame, or the path of a file.
            windows: Number of origins.
            step: Rows from one origin to the next; None for the horizon.
            refit: Whether to train before each origin.
            progress: As for `fit`.

        Returns:
            A long frame: `unique_id`, `ds`, `cutoff`, `y` and `forecast`.
        """
        step = self.horizon if step is None else step
        if windows < 1 or step < 1:
            raise ConfigError(
                f"windows and step must be 1 or more, got {windows} and {step}. Write windows=3."
            )
        series = read_table(table, get_layout(self._data))
        backs = [self.horizon + step * number for number in reversed(range(windows))]
        parts = list[dict[str, Any]]()
        for number, back in enumerate(backs):
            if refit or number == 0:
                self._fit(without_last(series, back), out=None, progress=progress)
            predictor, _ = self._ready(None)
            parts.append(predictor.backtest(series, back))
        self._like = same_kind(table)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return make_frame(columns, self._like)

    def save(self, path: str | Path) -> None:
        """Save the forecaster to a folder, as safetensors and JSON."""
        predictor, _ = self._ready(None)
        folder = Path(path).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            predictor.trained.write(folder)
            save_file(predictor.network.state_dict(), folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder} cannot be written: {error}. Name another.") from error

    @classmethod
    def load(cls, path: str | Path) -> Forecaster:
        """Load a saved forecaster, or the folder of a finished run of workload forecast.

        Args:
            path: The folder.

        Returns:
            A forecaster that can predict; `predict()` forecasts after the end of the fitted table.

        Raises:
            CheckpointError: The folder has no forecaster, or it is damaged.
        """
        folder = Path(path).expanduser()
        trained = Trained.read(folder)
        self = cls(trained.model.name, horizon=trained.data.horizon)
        self._arguments = as_arguments(
            {
                f"{name}.{key}": value
                for name, section in (
                    ("data", trained.data),
                    ("model", trained.model),
                    ("objective", trained.objective),
                )
                for key, value in section.model_dump(mode="json", exclude_unset=True).items()
            },
            SECTIONS.by_name,
        )
        self._data = trained.data
        self._take(folder, device=torch.device(detect_hardware("auto").device))
        return self

    def _fit(self, series: SeriesTable, *, out: str | Path | None, progress: bool | None) -> None:
        """Train, and load what the run wrote."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run" if out is None else Path(out)
            with using_frame(series), train(self.recipe, self._arguments, out=folder) as run:
                self.result = run.finish(progress=progress)
            self._take(folder, device=next(run.model.parameters()).device)
        self._table = series

    def _take(self, folder: Path, *, device: torch.device) -> None:
        """Load a forecaster's files."""
        self._predictor = Predictor(folder, device=device)
        self._table = self._predictor.trained.table

    def _ready(self, table: Any) -> tuple[Predictor, SeriesTable]:
        """Return the predictor and the table to forecast after; raise if nothing was fitted."""
        if self._predictor is None or self._table is None:
            raise ConfigError("The forecaster is not fitted. Call fit() or Forecaster.load().")
        if table is None:
            return self._predictor, self._table
        return self._predictor, read_table(table, get_layout(self._data))

    def _package_for(self, table: Any) -> str:
        return self._like if table is None else same_kind(table)
