"""What a run's task counts and how it is judged: said once, read by whatever shows the run."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from narrowcast.errors import CheckpointError, ConfigError

AVERAGED = "ema_"
"""Before the name of a metric that was taken with the average of the weights."""


_WAYS = ("lower", "higher")
_FORMAT = re.compile(r"[+,]{0,2}(\.\d{1,2})?[efg%]")
"""What `text` may be: it comes from a file, and a width could fill a page."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that an evaluation returns: its name, which way is better, how it is printed."""

    name: str
    better: Literal["lower", "higher"] = "lower"
    text: str = ".4g"
    """Format specification, e.g. `.4f` or `.1%`."""
    ranked: bool = True
    """False for a number that is neither better when lower nor when higher, such as a count."""

    def __post_init__(self) -> None:
        overrides = (self.name, self.better, self.text)
        if not all(isinstance(word, str) for word in overrides) or self.better not in _WAYS:
            raise ConfigError(f"metric {self.name!r}: better is lower or higher, not {self.better}")
        if not _FORMAT.fullmatch(self.text):
            raise ConfigError(f"metric {self.name!r}: text={self.text!r}; write e.g. .4g or .1%")

    def written(self, value: float) -> str:
        """Return a value as text."""
        return format(value, self.text) if math.isfinite(value) else str(value)

    def is_better(self, value: float, than: float) -> bool:
        """Say whether a value is better than another; one that is no number never is."""
        return value < than if self.better == "lower" else value > than


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """What is counted, which metrics there are, and which parts the loss has."""

    unit: str = "sample"
    """What `items` counts: token, sample, base, series."""
    plural: str = ""
    """More than one of it; left out, the unit with an s."""
    metrics: tuple[Metric, ...] = (Metric(name="loss"),)
    """Those of an evaluation; the first is the headline."""
    loss_parts: tuple[str, ...] = ()
    """Names of the parts of the loss; none where it is of one piece."""
    notes: tuple[str, ...] = ()
    """What a user should know of the model and the data before the first step, a line each."""

    def __post_init__(self) -> None:
        terms = (self.unit, self.plural, *self.loss_parts, *self.notes)
        if not all(isinstance(word, str) for word in terms):
            raise ConfigError("unit, plural, loss_parts and notes of a task are texts")
        for field in ("metrics", "loss_parts", "notes"):
            if isinstance(getattr(self, field), str | Metric):
                raise ConfigError(f"{field} of a task is a tuple: write {field}=(…,)")
        if strange := [metric for metric in self.metrics if not isinstance(metric, Metric)]:
            raise ConfigError(f"metrics of a task are Metric(name=…), not {strange[0]!r}")
        if self.unit.endswith("s") and not self.plural:
            raise ConfigError(
                f"unit={self.unit!r}: write one of what is counted, e.g. token; or plural= too"
            )
        names = [metric.name for metric in self.metrics]
        if averaged := [name for name in names if name.startswith(AVERAGED)]:
            raise ConfigError(
                f"metric {averaged[0]!r}: {AVERAGED}… is what the average of the weights gives; "
                "choose another name"
            )
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"a task has metrics of different names, the headline first: {names}")
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
        """Return the metric of that name, with or without the weights averaged.

        One that was not declared counts as lower is better.
        """
        bare = name.removeprefix(AVERAGED)
        result = next((m for m in self.metrics if m.name in (name, bare)), None)
        return Metric(name=name) if result is None else result

    @property
    def judged_by(self) -> tuple[object, ...]:
        """What two parts of one run must agree in; how it is printed may change."""
        metrics = tuple((metric.name, metric.better) for metric in self.metrics)
        return self.unit, metrics, self.loss_parts

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> TaskInfo:
        """Return what `to_json` was given; raise CheckpointError for anything else."""
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
"""Of a run folder that does not say: there were only language models then."""
