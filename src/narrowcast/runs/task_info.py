"""Units and metrics of a task, for everything that shows a run."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from narrowcast.errors import CheckpointError, ConfigError

AVERAGED = "ema_"
"""Prefix of metrics that were evaluated with the EMA weights."""


_WAYS = ("lower", "higher")
_FORMAT = re.compile(r"[+,]{0,2}(\.\d{1,2})?[efg%]")
"""Allowed format specifications: they come from a file, and a width could fill a page."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of an evaluation: its name, which way is better, how it is printed."""

    name: str
    better: Literal["lower", "higher"] = "lower"
    text: str = ".4g"
    """Format specification, e.g. `.4f` or `.1%`."""
    ranked: bool = True
    """False for a number that is neither better lower nor higher, such as a count."""

    def __post_init__(self) -> None:
        overrides = (self.name, self.better, self.text)
        if not all(isinstance(word, str) for word in overrides) or self.better not in _WAYS:
            raise ConfigError(
                f"better of metric {self.name!r} must be 'lower' or 'higher', got {self.better!r}."
            )
        if not _FORMAT.fullmatch(self.text):
            raise ConfigError(
                f"text of metric {self.name!r} must be a format such as .4g or .1%, got "
                f"{self.text!r}."
            )

    def written(self, value: float) -> str:
        """Return a value as text."""
        return format(value, self.text) if math.isfinite(value) else str(value)

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value is better than another; NaN never is."""
        return value < than if self.better == "lower" else value > than


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """Units, metrics and loss parts of a task."""

    unit: str = "sample"
    """What `items` counts: token, sample, base, series."""
    plural: str = ""
    """Plural of the unit; by default the unit with an s."""
    metrics: tuple[Metric, ...] = (Metric(name="loss"),)
    """Metrics of an evaluation; the first is the headline."""
    loss_parts: tuple[str, ...] = ()
    """Names of the loss parts; empty if the loss has none."""
    notes: tuple[str, ...] = ()
    """Lines about the model and the data to show before the first step."""

    def __post_init__(self) -> None:
        terms = (self.unit, self.plural, *self.loss_parts, *self.notes)
        if not all(isinstance(word, str) for word in terms):
            raise ConfigError(
                f"unit, plural, loss_parts and notes of a task must be text, got {terms!r}."
            )
        for field in ("metrics", "loss_parts", "notes"):
            if isinstance(getattr(self, field), str | Metric):
                raise ConfigError(
                    f"{field} of a task must be a tuple, got {getattr(self, field)!r}. Write "
                    f"{field}=(…,)."
                )
        if strange := [metric for metric in self.metrics if not isinstance(metric, Metric)]:
            raise ConfigError(f"metrics of a task must be Metric(name=…), got {strange[0]!r}.")
        if self.unit.endswith("s") and not self.plural:
            raise ConfigError(
                f"unit must be singular, got {self.unit!r}. Write e.g. token, or add plural=."
            )
        names = [metric.name for metric in self.metrics]
        if averaged := [name for name in names if name.startswith(AVERAGED)]:
            raise ConfigError(
                f"Names of metrics must not start with {AVERAGED}, which marks metrics of EMA "
                f"weights, got {averaged[0]!r}. Choose another name."
            )
        if not names or len(set(names)) != len(names):
            raise ConfigError(
                f"metrics of a task must have different names, the headline first, got {names}."
            )
        if not self.metrics[0].ranked:
            raise ConfigError(
                f"The first metric ranks runs, got {names[0]!r} with ranked=False. Put another "
                "metric first."
            )

    @property
    def units(self) -> str:
        """The plural of the unit."""
        return self.plural or f"{self.unit}s"

    @property
    def headline(self) -> Metric:
        """The metric that runs are compared by."""
        return self.metrics[0]

    def metric(self, name: str) -> Metric:
        """Return the metric of that name, also with the EMA prefix; lower is better if unknown."""
        bare = name.removeprefix(AVERAGED)
        result = next((m for m in self.metrics if m.name in (name, bare)), None)
        return Metric(name=name) if result is None else result

    @property
    def judged_by(self) -> tuple[object, ...]:
        """What all parts of one run must agree on; the format of numbers may change."""
        metrics = tuple((metric.name, metric.better) for metric in self.metrics)
        return self.unit, metrics, self.loss_parts

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> TaskInfo:
        """Return the result of `to_json` as a TaskInfo, or raise CheckpointError."""
        try:
            metrics = tuple(Metric(**metric) for metric in data["metrics"])
            texts = {key: tuple(data.get(key, ())) for key in ("loss_parts", "notes")}
            return cls(**{**data, "metrics": metrics, **texts})
        except (TypeError, KeyError, ConfigError) as error:
            raise CheckpointError(f"task.json is damaged: {error}") from error


BEFORE_TASK_JSON = TaskInfo(
    unit="token",
    metrics=(Metric(name="loss"), Metric(name="perplexity"), Metric(name="bits_per_byte")),
)
"""For run folders without task.json, which are of language models."""
