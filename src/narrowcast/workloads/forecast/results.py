"""What a forecaster achieves on windows it was not trained on, beside the baselines.

`summarise` measures it and returns the value that a run writes as `forecast.json`; the report draws
that file. Sums stay on the device until the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.plain_files import read_plain
from narrowcast.runs import RunFolder, strict_json
from narrowcast.workloads.forecast.baselines import baselines, season_length
from narrowcast.workloads.forecast.data.dates import shown_date
from narrowcast.workloads.forecast.data.table import SeriesTable
from narrowcast.workloads.forecast.intervals import conformal_radius
from narrowcast.workloads.forecast.metrics import mase_scale

FILE = "forecast.json"
LARGEST = 2**24
"""Bytes of that file."""
LEVELS = (0.8, 0.95)
"""Probabilities of the intervals."""
MOST_INTERVAL_WINDOWS = 512
"""Windows whose intervals are measured: quantiles of a distribution are computed on the CPU."""
MOST_POINTS = 400
"""Points of a curve."""
MOST_LISTED = 1000
"""Series with a row of their own."""
BINS = 41
"""Bars of the histogram of residuals."""
MODEL = "model"
_QUANTILE_PAIRS = tuple(((1 - level) / 2, (1 + level) / 2) for level in LEVELS)

Number = Annotated[float, Field(allow_inf_nan=False)] | None
Numbers = tuple[Number, ...]


class Predicted(NamedTuple):
    """Windows with their forecasts, scaled: windows × channels × rows."""

    x: Tensor
    """Lookback."""
    y: Tensor
    """Actual values."""
    observed: Tensor | None
    """Which values of `y` were observed; None if all were."""
    point: Tensor
    quantiles: tuple[Tensor | None, ...] = ()
    """Per level of `LEVELS` the borders of the interval (…, 2); None if there are none."""


Predict: TypeAlias = Callable[[Tensor, Sequence[tuple[float, float]]], Predicted]
"""Forecasts the windows that begin at some rows, and the quantiles that are requested."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Errors(_Value):
    """The errors of one forecaster over all windows."""

    name: str
    mae: Number
    """Of scaled values, as `mse` and `rmse`."""
    mse: Number
    rmse: Number
    smape: Number
    """In the units of the series."""
    mase: Number
    by_step: Numbers = Field(max_length=MOST_POINTS)
    """Mean absolute error per step, scaled."""


class SeriesErrors(_Value):
    """The errors of one series, or of one channel of a wide table."""

    name: str
    mae: Number
    """In the units of the series."""
    mase: Number
    baseline: Number
    """Mean absolute error of the best baseline."""


class Coverage(_Value):
    """How often one kind of interval holds the actual value."""

    level: float
    measured: Number
    width: Number
    """Mean width, scaled."""
    by_step: Numbers = Field(max_length=MOST_POINTS)


class Drawn(_Value):
    """One window: what came before, the forecast, and what happened."""

    kind: Literal["best", "median", "worst"]
    name: str
    mase: Number
    start: str
    """Date of the first forecast row."""
    end: str
    before: Numbers = Field(max_length=MOST_POINTS)
    actual: Numbers = Field(max_length=MOST_POINTS)
    forecast: Numbers = Field(max_length=MOST_POINTS)
    baseline: Numbers = Field(max_length=MOST_POINTS)
    lower: tuple[Numbers, ...] = ()
    """Per level of `ForecastResults.coverage`."""
    upper: tuple[Numbers, ...] = ()
    stride: int = Field(default=1, ge=1)
    """Rows from one point to the next."""


class ForecastResults(_Value):
    """All of `forecast.json`."""

    part: Literal["validation", "test"]
    windows: int = Field(ge=1)
    horizon: int = Field(ge=1)
    lookback: int = Field(ge=1)
    step: str
    season: int = Field(ge=1)
    steps: tuple[int, ...] = Field(max_length=MOST_POINTS)
    """The steps of all curves by step, counted from 1."""
    methods: tuple[Errors, ...]
    """The model first, then the baselines."""
    best_baseline: str
    series: tuple[SeriesErrors, ...] = Field(max_length=MOST_LISTED)
    series_count: int
    series_beaten: int
    """Series whose error is below that of the best baseline."""
    coverage: tuple[Coverage, ...] = ()
    interval_source: Literal["conformal", "distribution", ""] = ""
    residual_edges: Numbers = ()
    residual_counts: tuple[int, ...] = ()
    bias_by_step: Numbers = Field(default=(), max_length=MOST_POINTS)
    """Mean of actual values less forecasts, scaled."""
    drawn: tuple[Drawn, ...] = ()

    @property
    def model(self) -> Errors:
        """The errors of the trained model."""
        return self.methods[0]

    @property
    def baseline(self) -> Errors:
        """The errors of the best baseline."""
        return next(each for each in self.methods if each.name == self.best_baseline)


def write(folder: Path, results: ForecastResults) -> None:
    """Write the file into a run folder, whole or not at all."""
    RunFolder(folder).write_json(FILE, results.model_dump(mode="json"))


def read(folder: Path) -> ForecastResults:
    """Read the file; raise OSError where there is none, ValueError where it is damaged."""
    text = read_plain(folder / FILE, most=LARGEST).decode()
    return ForecastResults.model_validate(strict_json.loads(text))


@final
class _Sums:
    """Sums of errors per method, series and step, in float64 on the device."""

    def __init__(self, methods: int, units: int, horizon: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.absolute, self.squared, self.symmetric = (zeros(methods, units) for _ in range(3))
        self.by_step = zeros(methods, horizon)
        self.count, self.step_count, self.bias = zeros(units), zeros(horizon), zeros(horizon)
        self.histogram = zeros(BINS)

    def add(
        self,
        forecasts: Sequence[Tensor],
        predicted: Predicted,
        *,
        units: Tensor,
        centre: Tensor,
        spread: Tensor,
        reach: float,
    ) -> None:
        """Add windows; `units` is the series and channel of each row of errors."""
        y = predicted.y.float()
        there = torch.isfinite(y)
        if predicted.observed is not None:
            there &= predicted.observed
        y = torch.where(there, y, 0)
        self.count.index_add_(0, units, there.sum(-1).flatten().double())
        self.step_count += there.sum((0, 1))
        actual = y * spread[..., None] + centre[..., None]
        for row, forecast in enumerate(forecasts):
            error = torch.where(there, y - forecast, 0)
            size = error.abs()
            self.absolute[row].index_add_(0, units, size.sum(-1).flatten().double())
            self.squared[row].index_add_(0, units, error.square().sum(-1).flatten().double())
            other = forecast * spread[..., None] + centre[..., None]
            total = actual.abs() + other.abs()
            ratio = torch.where(total > 0, size * spread[..., None] / total, 0)
            ratio = 200 * torch.where(there, ratio, 0)
            self.symmetric[row].index_add_(0, units, ratio.sum(-1).flatten().double())
            self.by_step[row] += size.sum((0, 1))
            if row == 0:
                self.bias += error.sum((0, 1))
                place = ((error / reach + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
                self.histogram.index_add_(0, place.flatten(), there.flatten().double())


def summarise(
    predict: Predict,
    starts: Tensor,
    *,
    table: SeriesTable,
    centre: Tensor,
    spread: Tensor,
    train: Sequence[tuple[int, int]],
    residuals: Tensor | None = None,
    part: Literal["validation", "test"] = "test",
    batch_size: int = 256,
) -> ForecastResults:
    """Measure a forecaster and the baselines on windows. Synchronises at the end.

    Args:
        predict: forecasts windows by their first rows.
        starts: first rows of the windows, int64 on the CPU.
        table: the series.
        centre: of each series and channel, as `spread`: value = scaled * spread + centre.
        spread: what scaled values are multiples of.
        train: training rows of each series, for the scale of MASE.
        residuals: scaled errors on other windows (windows, channels, horizon), for conformal
            intervals where `predict` has no quantiles.
        part: what the windows are.
        batch_size: windows at once.
    """
    if not len(starts):
        raise ConfigError(f"There are no {part} windows to measure. Use a larger share of rows.")
    context = _Context(
        predict=predict, starts=starts, table=table, centre=centre, spread=spread,
        season=season_length(table.step), first=predict(starts[:1], ()),
    )  # fmt: skip
    reach = _reach(residuals, context.first)
    sums = context.add_up(reach, batch_size)
    names = (MODEL, *context.baselines)
    steps = tuple(range(0, context.horizon, -(-context.horizon // MOST_POINTS)))
    scales = _mase_scales(table, train, context.season)
    maes = sums.absolute.cpu() / sums.count.cpu() * spread.double().flatten()
    methods = tuple(
        _errors(name, row, sums=sums, mase=maes[row] / scales, steps=steps)
        for row, name in enumerate(names)
    )
    best = min(range(1, len(names)), key=lambda row: _or_inf(methods[row].mae))
    listed = [
        SeriesErrors(
            name=label,
            mae=_digits(maes[0, unit]),
            mase=_digits(maes[0, unit] / scales[unit]),
            baseline=_digits(maes[best, unit]),
        )
        for unit, label in enumerate(context.unit_labels())
    ]
    order = [unit for unit, each in enumerate(listed) if each.mae is not None]
    order.sort(key=lambda unit: (_or_inf(listed[unit].mase), _or_inf(listed[unit].mae)))
    radii = _radii(residuals)
    coverage, source = context.measure_intervals(radii, steps)
    bias = (sums.bias / sums.step_count).cpu()
    half = MOST_LISTED // 2
    return ForecastResults(
        part=part,
        windows=len(starts),
        horizon=context.horizon,
        lookback=context.first.x.shape[-1],
        step=table.step,
        season=context.season,
        steps=tuple(step + 1 for step in steps),
        methods=methods,
        best_baseline=names[best],
        series=tuple(
            listed[unit]
            for unit in (order if len(order) <= MOST_LISTED else order[:half] + order[-half:])
        ),
        series_count=len(order),
        series_beaten=sum(
            _or_inf(listed[unit].mae) < _or_inf(listed[unit].baseline) for unit in order
        ),
        coverage=coverage,
        interval_source=source,
        residual_edges=tuple(_digits(reach * (2 * edge / BINS - 1)) for edge in range(BINS + 1)),
        residual_counts=tuple(int(each) for each in sums.histogram.cpu().tolist()),
        bias_by_step=tuple(_digits(bias[step]) for step in steps),
        drawn=tuple(
            context.draw(kind, unit, listed[unit], names[best], radii)
            for kind, unit in _examples(
                [unit for unit in order if listed[unit].mase is not None] or order
            )
        ),
    )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Context:
    """Windows of a table and the functions that forecast them."""

    predict: Predict
    starts: Tensor
    table: SeriesTable
    centre: Tensor
    spread: Tensor
    season: int
    first: Predicted

    @property
    def horizon(self) -> int:
        return self.first.y.shape[-1]

    @property
    def channels(self) -> int:
        return self.first.y.shape[1]

    @property
    def baselines(self) -> Mapping[str, Callable[[Tensor, int], Tensor]]:
        return baselines(self.season, self.first.x.shape[-1])

    def unit_labels(self) -> list[str]:
        """Return the name of each series and channel."""
        names, channels = self.table.names, self.table.channels
        if names == channels or len(channels) == 1:
            return list(names)
        return [f"{name}, {channel}" for name in names for channel in channels]

    def series_at(self, starts: Tensor) -> Tensor:
        """Return the series of windows."""
        return torch.searchsorted(torch.tensor(self.table.offsets[1:]), starts, right=True)

    def add_up(self, reach: float, batch_size: int) -> _Sums:
        """Return the sums of errors over all windows."""
        device = self.first.y.device
        centre, spread = (each.float().to(device) for each in (self.centre, self.spread))
        units = self.table.series * self.channels
        sums = _Sums(1 + len(self.baselines), units, self.horizon, device)
        channels = torch.arange(self.channels, device=device)
        for batch in self.starts.split(batch_size):
            predicted = self.predict(batch, ())
            series = self.series_at(batch).to(device)
            x = predicted.x.float().mT
            others = [each(x, self.horizon).mT for each in self.baselines.values()]
            sums.add(
                [predicted.point.float(), *others],
                predicted,
                units=(series[:, None] * self.channels + channels).flatten(),
                centre=centre[series],
                spread=spread[series],
                reach=reach,
            )
        return sums

    def intervals(
        self, predicted: Predicted, radii: Tensor | None
    ) -> tuple[list[tuple[float, Tensor, Tensor]], Literal["conformal", "distribution", ""]]:
        """Return level, lower and upper border of each kind of interval there is."""
        if any(each is not None for each in predicted.quantiles):
            borders = zip(LEVELS, predicted.quantiles, strict=True)
            return [
                (level, each[..., 0], each[..., 1]) for level, each in borders if each is not None
            ], "distribution"
        if radii is None:
            return [], ""
        point = predicted.point.float()
        radii = radii.to(point)
        return [
            (level, point - radius, point + radius)
            for level, radius in zip(LEVELS, radii, strict=False)
        ], "conformal"

    def measure_intervals(
        self, radii: Tensor | None, steps: Sequence[int]
    ) -> tuple[tuple[Coverage, ...], Literal["conformal", "distribution", ""]]:
        """Return how often intervals hold the actual values of windows spread over all."""
        count = min(len(self.starts), MOST_INTERVAL_WINDOWS)
        chosen = self.starts[torch.arange(count) * len(self.starts) // count]
        inside: dict[float, list[Tensor]] = {}
        widths: dict[float, list[Tensor]] = {}
        source: Literal["conformal", "distribution", ""] = ""
        for batch in chosen.split(64):
            predicted = self.predict(batch, _QUANTILE_PAIRS)
            borders, source = self.intervals(predicted, radii)
            actual = predicted.y.float()
            if predicted.observed is not None:
                actual = torch.where(predicted.observed, actual, torch.nan)
            for level, lower, upper in borders:
                held = ((actual >= lower) & (actual <= upper)).float()
                held = torch.where(actual.isnan(), torch.nan, held)
                inside.setdefault(level, []).append(held)
                widths.setdefault(level, []).append(upper - lower)
        results = []
        for level, parts in inside.items():
            held = torch.cat(parts).double()
            by_step = held.nanmean((0, 1)).cpu()
            results.append(
                Coverage(
                    level=level,
                    measured=_digits(held.nanmean()),
                    width=_digits(torch.cat(widths[level]).double().mean()),
                    by_step=tuple(_digits(by_step[step]) for step in steps),
                )
            )
        return tuple(results), source

    def draw(
        self,
        kind: Literal["best", "median", "worst"],
        unit: int,
        errors: SeriesErrors,
        baseline: str,
        radii: Tensor | None,
    ) -> Drawn:
        """Return the last window of a series."""
        series, channel = divmod(unit, self.channels)
        start = self.starts[self.series_at(self.starts) == series].max()
        predicted = self.predict(start[None], _QUANTILE_PAIRS)
        lookback = predicted.x.shape[-1]
        centre, spread = (float(each[series, channel]) for each in (self.centre, self.spread))
        shown = min(lookback, max(self.horizon, 2 * self.season))
        stride = -(-max(shown, self.horizon) // MOST_POINTS)

        def values(scaled: Tensor) -> Numbers:
            row = scaled[0, channel].double().cpu() * spread + centre
            return tuple(_digits(value) for value in row[::stride])

        forecaster = self.baselines[baseline]
        actual = predicted.y.float()
        if predicted.observed is not None:
            actual = torch.where(predicted.observed, actual, torch.nan)
        borders = self.intervals(predicted, radii)[0]
        row = int(start) + lookback
        return Drawn(
            kind=kind,
            name=errors.name,
            mase=errors.mase,
            start=shown_date(self.table.dates[row]),
            end=shown_date(self.table.dates[row + self.horizon - 1]),
            before=values(predicted.x[..., lookback - (shown // stride) * stride :]),
            actual=values(actual),
            forecast=values(predicted.point),
            baseline=values(forecaster(predicted.x.float().mT, self.horizon).mT),
            lower=tuple(values(lower) for _, lower, _ in borders),
            upper=tuple(values(upper) for _, _, upper in borders),
            stride=stride,
        )


def _errors(name: str, row: int, *, sums: _Sums, mase: Tensor, steps: Sequence[int]) -> Errors:
    total = sums.count.sum()
    by_step = (sums.by_step[row] / sums.step_count).cpu()
    mse = sums.squared[row].sum() / total
    # Series with more values weigh more, as in the other errors.
    count = torch.where(mase.isfinite(), sums.count.cpu(), 0)
    return Errors(
        name=name,
        mae=_digits(sums.absolute[row].sum() / total),
        mse=_digits(mse),
        rmse=_digits(mse.sqrt()),
        smape=_digits(sums.symmetric[row].sum() / total),
        mase=_digits((mase.nan_to_num(0, 0, 0) * count).sum() / count.sum()),
        by_step=tuple(_digits(by_step[step]) for step in steps),
    )


def _mase_scales(table: SeriesTable, train: Sequence[tuple[int, int]], season: int) -> Tensor:
    """Return the seasonal naive error per series and channel; NaN if there is none."""
    scales = torch.full((table.series, len(table.channels)), torch.nan, dtype=torch.float64)
    for index, (start, end) in enumerate(train):
        if end - start > season:
            rows = torch.where(table.observed[start:end], table.values[start:end], torch.nan)
            scales[index] = mase_scale(rows, season)
    return torch.where(scales > 0, scales, torch.nan).flatten()


def _radii(residuals: Tensor | None) -> Tensor | None:
    """Return the radii of as many levels as there are windows for."""
    if residuals is not None:
        for count in range(len(LEVELS), 0, -1):
            with suppress(ConfigError):
                return conformal_radius(residuals, LEVELS[:count])
    return None


def _reach(residuals: Tensor | None, first: Predicted) -> float:
    """Return where the histogram of residuals ends. Synchronises."""
    sizes = (first.y - first.point if residuals is None else residuals).float().abs().flatten()
    known = sizes[sizes.isfinite()].cpu().numpy()
    if not known.size:
        return 1.0
    # Without residuals of other windows, one window is a guess.
    return float(np.quantile(known, 0.99)) * (1 if residuals is not None else 3) or 1.0


def _examples(order: Sequence[int]) -> Iterator[tuple[Literal["best", "median", "worst"], int]]:
    """Yield the best, median and worst of units in order of their errors."""
    if order:
        yield "best", order[0]
    if len(order) > 2:
        yield "median", order[len(order) // 2]
    if len(order) > 1:
        yield "worst", order[-1]


def _digits(value: Tensor | float) -> float | None:
    """Return a number with six digits; None if it is not finite."""
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value
