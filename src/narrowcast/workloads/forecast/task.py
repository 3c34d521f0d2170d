"""The forecast task: windows, training loss, evaluation and results."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import EvalBatches, Task
from narrowcast.workloads.forecast import results
from narrowcast.workloads.forecast.data.split import Ranges, Split, ltsf_split, split
from narrowcast.workloads.forecast.data.table import Layout, SeriesTable, read_table
from narrowcast.workloads.forecast.heads import Head, make_head
from narrowcast.workloads.forecast.made import made_table
from narrowcast.workloads.forecast.models.network import ForecastNetwork, make_network
from narrowcast.workloads.forecast.report import verdict
from narrowcast.workloads.forecast.saved import Trained, get_layout, get_shape, last_rows
from narrowcast.workloads.forecast.scaling import Scaling, on_device
from narrowcast.workloads.forecast.settings import (
    FRAME,
    MADE,
    ForecastData,
    ForecastModel,
    Objective,
)
from narrowcast.workloads.forecast.windows import DeviceSeries, Starts, Window, find_starts

MOST_CALIBRATION_WINDOWS, MOST_RESIDUALS = 512, 2**22
"""Validation windows, and values of them, whose errors are saved for intervals."""
_FRAME: ContextVar[SeriesTable | None] = ContextVar("frame", default=None)


@contextmanager
def using_frame(table: SeriesTable) -> Iterator[None]:
    """Use a table in memory for `data.path=frame` inside the block."""
    token = _FRAME.set(table)
    try:
        yield
    finally:
        _FRAME.reset(token)


def load_table(recipe: Recipe) -> SeriesTable:
    """Return the table of a recipe."""
    data = recipe.section(ForecastData)
    if data.path == MADE:
        return made_table(recipe.seed)
    if data.path == FRAME:
        table = _FRAME.get()
        if table is None:
            raise ConfigError(
                f"data.path={FRAME} is the table of a narrowcast.forecast.Forecaster, which is not "
                "in a file. Write data.path=FILE."
            )
        return table
    path = expand_path(data.path)
    archive, inside, _ = str(path).partition(".zip/")
    file = Path(f"{archive}.zip") if inside else path
    status = file.stat() if file.exists() else None
    version = None if status is None else (status.st_mtime_ns, status.st_size)
    return _read(path, get_layout(data), version)


@lru_cache(maxsize=1)
def _read(path: Path, layout: Layout, version: object) -> SeriesTable:
    """Read a table once for the plan and the run."""
    return read_table(path, layout)


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the task of a forecast recipe."""
    return build_forecast(recipe, device=device).task()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Forecast:
    """A network with its series, cut into training, validation and test windows."""

    recipe: Recipe
    table: SeriesTable
    network: ForecastNetwork
    head: Head
    scaling: Scaling
    series: DeviceSeries
    train: Starts
    validation: Starts
    test: Starts
    train_rows: Ranges
    """Training rows of each series."""
    left_out: tuple[str, ...]
    """Series that are too short."""
    device: torch.device
    test_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the test windows, once the run has ended."""
    comparison: list[str] = field(default_factory=list)
    """How the model compares with the best baseline, once the run has ended."""

    def task(self) -> Task:
        """Return the task for the trainer."""
        channels = len(self.table.channels)
        masked = self.series.observed is not None
        return Task(
            model=self.network,
            train_data=self.train,
            loss=self.loss,
            evaluate=self.evaluate,
            items=len,
            info=TaskInfo(unit="window", metrics=self.metrics(), notes=self.notes()),
            gemm_rows=self.network.gemm_rows(self.recipe.batch_size, channels),
            held_out=self.held_out(),
            data_digest=lambda: fingerprint(self.table.values, self.table.observed),
            loss_terms=self.count_observed if masked else None,
            write_results=self.write_results,
            summary=self.summary,
        )

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics on scaled values, the loss first."""
        names = dict.fromkeys((self.head.metric, "mse", "mae"))
        return tuple(Metric(name=name, text=".4f") for name in names)

    def notes(self) -> tuple[str, ...]:
        """Return what the data is, and what was changed while it was read."""
        table, data = self.table, self.recipe.section(ForecastData)
        wide = f"{len(table.channels)} channels" if table.series == 1 else f"{table.series} series"
        first = (
            f"{wide}, {len(table.dates):,} rows of {table.step}; {data.lookback} rows in, "
            f"{data.horizon} out"
        )
        counts = {"training": self.train, "validation": self.validation, "test": self.test}
        second = ", ".join(f"{len(starts):,} {name}" for name, starts in counts.items())
        return (first, f"{second} windows", *table.notes, *self.left_out)

    def windows(self, starts: Tensor) -> Window:
        """Return windows by their first rows, which may be on the CPU."""
        return self.series.windows(starts.to(self.device))

    def numbers(self, model: nn.Module, window: Window) -> Tensor:
        """Return the head's numbers for windows."""
        out: Tensor = model(window.x, window.past, window.future, window.static)
        return out

    def loss(self, model: nn.Module, starts: Tensor) -> Tensor:
        """Return the mean loss over the observed values of a batch."""
        window = self.series.windows(starts)
        losses = self.head.losses(self.numbers(model, window), window.y)
        return _mean(losses, window.observed)

    def count_observed(self, starts: Tensor) -> Tensor:
        """Return how many values of a batch were observed, on the device."""
        observed = self.series.windows(starts).observed
        assert observed is not None
        return observed.sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Evaluate on validation windows. Synchronises."""
        data = self.recipe.section(ForecastData)
        return self.measure(model, self.validation.spread(data.eval_windows))

    def measure(self, model: nn.Module, starts: Starts) -> dict[str, float]:
        """Return the metrics of windows on scaled values. Synchronises once."""
        names = [metric.name for metric in self.metrics()]
        sums = []
        with torch.no_grad():
            for batch in starts.batches(self.recipe.batch_size):
                window = self.windows(batch)
                numbers = self.numbers(model, window)
                error = self.head.point(numbers) - window.y
                each = {"mse": error.square(), "mae": error.abs()}
                each.setdefault(self.head.metric, self.head.losses(numbers, window.y))
                terms = torch.ones_like(window.y) if window.observed is None else window.observed
                totals = [_total(each[name], window.observed) for name in names]
                sums.append(torch.stack([*totals, terms.sum(dtype=torch.float32)]))
        *means, count = torch.stack(sums).cpu().double().sum(0).tolist()
        return {name: total / max(count, 1) for name, total in zip(names, means, strict=True)}

    def held_out(self) -> EvalBatches | None:
        """Return the validation windows in parts."""
        count = self.recipe.section(ForecastData).eval_windows
        batches = list(self.validation.spread(count).batches(self.recipe.batch_size))
        if not batches:
            return None

        def headline(model: nn.Module, part: int) -> Tensor:
            window = self.windows(batches[part])
            return _mean(self.head.losses(self.numbers(model, window), window.y), window.observed)

        return EvalBatches(parts=len(batches), headline=headline)

    def write_results(self, folder: Path, prepared: Prepared) -> None:
        """Write what later forecasts need, and evaluate the test windows."""
        model = prepared.model
        with torch.no_grad(), in_eval_mode(model), prepared.autocast():
            residuals = self.residuals(model)
            measured = self.summarised(model, residuals)
            if len(self.test):
                self.test_metrics.update(self.measure(model, self.test))
        self.comparison[:] = [verdict(measured)]
        results.write(folder, measured)
        data = self.recipe.section(ForecastData)
        Trained(
            data=data,
            model=self.recipe.section(ForecastModel),
            objective=self.recipe.section(Objective),
            table=last_rows(self.table, data.lookback),
            scaling=self.scaling,
            residuals=residuals,
        ).write(folder)

    def summarised(self, model: nn.Module, residuals: Tensor) -> results.ForecastResults:
        """Return the errors of the test windows, or without these of the validation windows."""

        def predict(starts: Tensor, pairs: Sequence[tuple[float, float]]) -> results.Predicted:
            window = self.windows(starts)
            numbers = self.numbers(model, window)
            return results.Predicted(
                x=window.x,
                y=window.y,
                observed=window.observed,
                point=self.head.point(numbers),
                quantiles=tuple(self.head.quantiles(numbers, pair) for pair in pairs),
            )

        tested = len(self.test) > 0
        return results.summarise(
            predict,
            (self.test if tested else self.validation).rows,
            table=self.table,
            centre=self.scaling.centre,
            spread=self.scaling.spread,
            train=self.train_rows,
            # The windows that intervals come from cannot say how good they are.
            residuals=residuals if tested else None,
            part="test" if tested else "validation",
            batch_size=self.recipe.batch_size,
        )

    def residuals(self, model: nn.Module) -> Tensor:
        """Return scaled errors on validation windows, NaN where nothing was observed."""
        size = len(self.table.channels) * self.series.horizon
        count = max(1, min(MOST_CALIBRATION_WINDOWS, MOST_RESIDUALS // size))
        parts = []
        for batch in self.validation.spread(count).batches(self.recipe.batch_size):
            window = self.windows(batch)
            error = window.y - self.head.point(self.numbers(model, window))
            if window.observed is not None:
                error = torch.where(window.observed, error, torch.nan)
            parts.append(error.float().cpu())
        return torch.cat(parts)

    def summary(self) -> Sequence[str]:
        """Return the test metrics as a line, and the comparison with the baselines."""
        if not self.test_metrics:
            return self.comparison
        values = (f"{m.name} {m.written(self.test_metrics[m.name])}" for m in self.metrics())
        return [f"test {', '.join(values)}, scaled by the training rows", *self.comparison]


def _mean(losses: Tensor, observed: Tensor | None) -> Tensor:
    """Return the mean over observed values."""
    if observed is None:
        return losses.mean()
    return (losses * observed).sum() / observed.sum().clamp_min(1)


def _total(values: Tensor, observed: Tensor | None) -> Tensor:
    return values.sum() if observed is None else (values * observed).sum()


def build_forecast(recipe: Recipe, *, device: torch.device) -> Forecast:
    """Read the series and build the network on `device`."""
    data, settings = recipe.section(ForecastData), recipe.section(ForecastModel)
    settings.check_exogenous(data)
    table = load_table(recipe)
    parts = split_rows(table, data)
    cut = partial(find_starts, offsets=table.offsets, lookback=data.lookback, horizon=data.horizon)
    scaling = Scaling.fit(table, parts.train, how=data.scale)
    series = on_device(
        table,
        scaling,
        lookback=data.lookback,
        horizon=data.horizon,
        device=device,
    )
    head = make_head(recipe.section(Objective), device=device)
    shape = get_shape(table, data, head)
    network = make_network(settings, shape, head, seed=recipe.seed, device=device)
    return Forecast(
        recipe=recipe,
        table=table,
        network=network,
        head=head,
        scaling=scaling,
        series=series,
        train=cut(parts.train, stride=data.stride),
        validation=cut(parts.validation),
        test=cut(parts.test),
        train_rows=parts.train,
        left_out=parts.notes,
        device=device,
    )


def split_rows(table: SeriesTable, data: ForecastData) -> Split:
    """Return the rows that each part forecasts."""
    if data.split == "ltsf":
        return ltsf_split(table)
    return split(
        table,
        lookback=data.lookback,
        horizon=data.horizon,
        validation=data.validation_share,
        test=data.test_share,
        short=data.short,
    )
