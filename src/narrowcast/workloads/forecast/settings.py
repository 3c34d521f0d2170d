"""Recipe sections of the forecast workload."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.section import Conflict, Section, check_conflicts
from narrowcast.config.sections import DataSection, Sections

MADE, FRAME = "made", "frame"
"""data.path of synthetic series, and of the frame that a Forecaster was given."""
LONGEST = 2**20
"""Rows of a window: two years of minutes."""
MOST_COLUMNS = 100_000
MOST_QUANTILES = 1000

Text = Annotated[str, Field(max_length=4096)]
Column = Annotated[str, Field(min_length=1, max_length=1024)]
Columns = Annotated[tuple[Column, ...], Field(max_length=MOST_COLUMNS)]
Share = Annotated[float, Field(gt=0, lt=1)]
Level = Annotated[float, Field(gt=0, lt=1)]
ModelName = Literal["nlinear", "dlinear", "nhits", "patchtst", "itransformer", "lstm"]


class ForecastData(DataSection):
    """Which series to train on, and how windows are cut from them."""

    places: ClassVar[tuple[str, ...]] = ("path",)
    shorthand: ClassVar[tuple[str, ...]] = ("horizon", "lookback")

    path: Text = Field(
        default=MADE,
        description="CSV or parquet file: a wide table (a date, then one column per series) or a "
        f"long table (unique_id, ds, y); {MADE}: synthetic series drawn from the seed",
    )
    horizon: int = Field(default=96, ge=1, le=LONGEST, description="rows to forecast")
    lookback: int = Field(
        default=336, ge=1, le=LONGEST, description="rows that the model sees before the forecast"
    )
    time: Text = Field(default="", description="column of dates; empty: ds, date or the first")
    id: Text = Field(
        default="", description="column that names the series of a long table; empty: unique_id"
    )
    step: Text = Field(
        default="", description="time between rows, such as 15min, 1h or 1MS; empty: the usual one"
    )
    target: Columns = Field(
        default=(), description="columns to forecast; none: y, or all other columns"
    )
    past: Columns = Field(
        default=(), description="columns known up to now, such as measured temperature"
    )
    future: Columns = Field(
        default=(), description="columns known ahead, such as holidays or prices"
    )
    static: Columns = Field(default=(), description="columns that are constant per series")
    calendar: bool = Field(
        default=False, description="add hour, weekday and so on to the columns known ahead"
    )
    fill: Literal["raise", "forward", "interpolate", "zero"] = Field(
        default="raise", description="what to do with missing values"
    )
    date_format: Text = Field(
        default="", description="format of dates for strptime, such as %d/%m/%Y; empty: detected"
    )
    delimiter: Annotated[str, Field(max_length=1)] = Field(
        default="", description="what separates columns of a CSV file; empty: detected"
    )
    decimal: Literal[".", ","] = Field(default=".", description="decimal sign of a CSV file")
    split: Literal["time", "ltsf"] = Field(
        default="time",
        description="time: the last shares of every series are validation and test data; ltsf: "
        "the published split of the ETT files (12, 4 and 4 months)",
    )
    validation_share: Share = Field(
        default=0.1, description="share of the rows for validation (split=time)"
    )
    test_share: float = Field(
        default=0.2, ge=0, lt=1, description="share of the rows for testing (split=time); 0: none"
    )
    short: Literal["raise", "drop"] = Field(
        default="raise", description="what to do with series that are too short for a window"
    )
    scale: Literal["standard", "robust", "none"] = Field(
        default="standard",
        description="scaling of every series by its training rows: mean and deviation, median and "
        "quartiles, or none",
    )
    stride: int = Field(
        default=1, ge=1, le=LONGEST, description="rows from one training window to the next"
    )
    eval_windows: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="validation windows per evaluation, spread evenly; none: all. The test always "
        "uses all windows",
    )

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        if self.path in (MADE, FRAME):
            return {}
        archive, inside, _ = self.path.partition(".zip/")
        return {"path": (f"{archive}.zip" if inside else self.path,)}

    def conflicts(self) -> Iterator[Conflict]:
        """Yield shares that leave nothing to train on, and columns that made series lack."""
        if self.validation_share + self.test_share >= 1:
            text = (
                "validation_share and test_share must leave rows for training, got "
                f"{self.validation_share:g} and {self.test_share:g}. Write test_share=0.2"
            )
            yield ("test_share", "validation_share"), text
        if self.path == MADE:
            for name in ("time", "id", "step", "target", "past", "future", "static"):
                if getattr(self, name):
                    text = f"{name} needs a table from a file. Write data.path, or leave {name} out"
                    yield (name, "path"), text
        names = [*self.target, *self.past, *self.future, *self.static]
        if twice := {name for name in names if names.count(name) > 1}:
            text = f"column {min(twice)} is named twice. Name each column once"
            yield ("target", "past", "future", "static"), text


_TAKERS: Mapping[str, tuple[ModelName, ...]] = {
    "layers": ("nhits", "patchtst", "itransformer", "lstm"),
    "width": ("nhits", "patchtst", "itransformer", "lstm"),
    "heads": ("patchtst", "itransformer"),
    "mlp_width": ("patchtst", "itransformer"),
    "dropout": ("nhits", "patchtst", "itransformer", "lstm"),
    "patch": ("patchtst",),
    "patch_stride": ("patchtst",),
    "kernel": ("dlinear",),
    "pools": ("nhits",),
    "downsample": ("nhits",),
}
"""The models that read a setting."""
_EXOGENOUS: Mapping[ModelName, tuple[str, ...]] = {
    "nlinear": (),
    "dlinear": (),
    "nhits": ("past", "future", "static"),
    "patchtst": (),
    "itransformer": ("past", "future"),
    "lstm": ("past", "future", "static"),
}
"""The kinds of exogenous columns that each model reads."""


class ForecastModel(Section):
    """The network. Settings without a value take the default of the model."""

    name: ModelName = Field(default="nlinear", description="model")
    layers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="layers of the transformer or LSTM, or of each MLP of N-HiTS; none: 3 (patchtst"
        "), 2 (others)",
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="hidden size; none: 512 (nhits, itransformer), 128 (others)",
    )
    heads: int | None = Field(
        default=None, ge=1, le=2**16, description="attention heads; none: 8, or 16 (patchtst)"
    )
    mlp_width: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="width of the transformer's MLP; none: 2 width",
    )
    dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="dropout probability; none: 0.2 (patchtst), 0.1 (itransformer), 0 (others)",
    )
    patch: int = Field(default=16, ge=1, le=LONGEST, description="rows per patch")
    patch_stride: int = Field(
        default=8, ge=1, le=LONGEST, description="rows from one patch to the next"
    )
    kernel: int = Field(
        default=25, ge=1, le=LONGEST, description="rows of the moving average that is the trend"
    )
    pools: Annotated[tuple[Annotated[int, Field(ge=1, le=LONGEST)], ...], Field(max_length=64)] = (
        Field(default=(2, 2, 1), description="width of the max-pooling of each N-HiTS stack")
    )
    downsample: Annotated[
        tuple[Annotated[int, Field(ge=1, le=LONGEST)], ...], Field(max_length=64)
    ] = Field(default=(4, 2, 1), description="rows per forecast coefficient of each N-HiTS stack")
    normalize: Literal["none", "last", "mean", "standard", "robust"] | None = Field(
        default=None,
        description="scaling of each window by its own rows, undone in the forecast: subtract the "
        "last value, the mean, or standardise it (RevIN); none: the model's",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield settings that the model ignores, and shapes that do not fit together."""
        for key, takers in _TAKERS.items():
            default = type(self).model_fields[key].default
            if self.name not in takers and getattr(self, key) != default:
                text = f"{self.name} has no {key}. Leave {key} out, or choose {' or '.join(takers)}"
                yield (key, "name"), text
        if self.name == "nlinear" and self.normalize not in (None, "last"):
            text = "nlinear subtracts the last value. Leave normalize out, or choose dlinear"
            yield ("normalize", "name"), text
        if len(self.pools) != len(self.downsample) or not self.pools:
            text = (
                "pools and downsample must have one number per stack, got "
                f"{len(self.pools)} and {len(self.downsample)}. Write pools=[2,2,1], "
                "downsample=[4,2,1]"
            )
            yield ("pools", "downsample"), text
        width, heads = self.get_width(), self.get_heads()
        if self.name in _TAKERS["heads"] and width % heads:
            text = f"heads must divide width {width}, got {heads}. Write heads=1, or another width"
            yield ("heads", "width"), text

    def get_width(self) -> int:
        """Return the hidden size."""
        return self.width or (512 if self.name in ("nhits", "itransformer") else 128)

    def get_heads(self) -> int:
        """Return the number of attention heads."""
        return self.heads or (16 if self.name == "patchtst" else 8)

    def get_layers(self) -> int:
        """Return the number of layers."""
        return self.layers or (3 if self.name == "patchtst" else 2)

    def get_dropout(self) -> float:
        """Return the dropout probability."""
        default = {"patchtst": 0.2, "itransformer": 0.1}.get(self.name, 0.0)
        return default if self.dropout is None else self.dropout

    def get_normalize(self) -> str:
        """Return how windows are scaled."""
        default = {"nlinear": "last", "dlinear": "none", "nhits": "none"}
        return self.normalize or default.get(self.name, "standard")

    def check_exogenous(self, data: ForecastData) -> None:
        """Raise for exogenous columns that the model does not read."""
        from narrowcast.errors import UnsupportedError

        for kind in ("past", "future", "static"):
            if getattr(data, kind) and kind not in _EXOGENOUS[self.name]:
                takers = [name for name, kinds in _EXOGENOUS.items() if kind in kinds]
                raise UnsupportedError(
                    f"{self.name} reads no {kind} columns, got data.{kind}="
                    f"{','.join(getattr(data, kind))}. Leave data.{kind} out, or write "
                    f"model.name={' or '.join(takers)}."
                )
        if data.calendar and "future" not in _EXOGENOUS[self.name]:
            takers = [name for name, kinds in _EXOGENOUS.items() if "future" in kinds]
            raise UnsupportedError(
                f"{self.name} reads no calendar, got data.calendar=true. Leave data.calendar out, "
                f"or write model.name={' or '.join(takers)}."
            )


class Objective(Section):
    """What the network predicts for each row, and its loss."""

    head: Literal["point", "quantile", "student_t"] = Field(
        default="point",
        description="one value per row, several quantiles, or a Student-t distribution",
    )
    loss: Literal["mse", "mae", "huber"] = Field(
        default="mse", description="loss of the point head, on scaled values"
    )
    delta: float = Field(
        default=1.0, gt=0, le=1e6, description="error where the huber loss becomes linear"
    )
    quantiles: Annotated[tuple[Level, ...], Field(max_length=MOST_QUANTILES)] = Field(
        default=(0.1, 0.25, 0.5, 0.75, 0.9), description="levels of the quantile head, ascending"
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check that the head reads the settings."""
        for key, head in (("loss", "point"), ("delta", "point"), ("quantiles", "quantile")):
            default = type(self).model_fields[key].default
            if self.head != head and getattr(self, key) != default:
                text = f"{key} needs head={head}. Leave {key} out, or write head={head}"
                check_conflicts([((key, "head"), text)])
        if self.delta != 1.0 and self.loss != "huber":
            text = "delta needs loss=huber. Leave delta out, or write loss=huber"
            check_conflicts([(("delta", "loss"), text)])
        levels = self.quantiles
        if not levels or any(a >= b for a, b in itertools.pairwise(levels)):
            text = "quantiles must ascend. Write e.g. quantiles=[0.1,0.5,0.9]"
            check_conflicts([(("quantiles",), text)])
        if 0.5 not in levels:
            text = "quantiles must have 0.5, the median. Write e.g. quantiles=[0.1,0.5,0.9]"
            check_conflicts([(("quantiles",), text)])
        return self


SECTIONS = Sections(data=ForecastData, model=ForecastModel, objective=Objective)
