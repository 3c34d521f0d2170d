"""An ablation as a value: what a model loses with its networks, and with channels drawn by chance.

The standard library only: a report draws it where torch is not.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, final, get_args, get_origin, get_type_hints

from narrowcast.errors import ConfigError
from narrowcast.plain_files import read_plain
from narrowcast.runs import strict_json
from narrowcast.runs.writing import replace_file

FORMAT = "narrowcast.ablation.1"
SIGNIFICANT = 0.05
Answer: TypeAlias = Literal["more", "less", "not shown"]
_Value = TypeVar("_Value")


@final
@dataclass(frozen=True, kw_only=True)
class Level:
    """How well a model predicts the next token."""

    loss: float
    """Nats a token."""
    accuracy: float
    """Share of tokens that were the most likely one."""


@final
@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number, and between what it is in 95 of 100 samples like this one."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@final
@dataclass(frozen=True, kw_only=True)
class Versus:
    """A lesion beside random ones."""

    channels: int
    """That each of them silences."""
    masks: tuple[Level, ...]
    difference: Interval
    """Of losses: the lesion's less the mean of the random ones, over the same documents."""
    at_least: int
    """Random masks with a loss as high or higher."""
    at_most: int
    """Random masks with a loss as low or lower."""
    tests: int = 1
    """Lesions that are tested together, each as one of so many."""

    @property
    def p(self) -> float:
        """The chance of a rank this extreme, at either end, if the lesion were a random mask.

        Two-sided, and multiplied by the number of tests (Bonferroni): calls of random networks in
        any of the tests are no more frequent than this.
        """
        rank = 1 + min(self.at_least, self.at_most)
        return min(1.0, 2 * self.tests * rank / (1 + len(self.masks)))

    @property
    def fewest_masks(self) -> int:
        """Random masks that it takes for a lesion beyond all of them to be significant."""
        return math.ceil(2 * self.tests / SIGNIFICANT) - 1

    @property
    def mean_loss(self) -> float:
        """Of the random masks."""
        return sum(level.loss for level in self.masks) / len(self.masks)

    @property
    def answer(self) -> Answer:
        """Whether the lesion costs more than chance would; less; or neither could be shown."""
        if self.p > SIGNIFICANT:
            return "not shown"
        if self.difference.low > 0 and self.at_least < self.at_most:
            return "more"
        below = self.difference.high < 0 and self.at_most < self.at_least
        return "less" if below else "not shown"


@final
@dataclass(frozen=True, kw_only=True)
class Lesion:
    """Networks silenced."""

    components: tuple[int, ...]
    channels: int
    level: Level
    cost: Interval
    """The loss above that of the whole model."""
    equal: Versus
    """Beside random channels, as many in each layer."""


@final
@dataclass(frozen=True, kw_only=True)
class KeepOnlyResult:
    """All channels silenced but those of the first networks."""

    components: int
    channels: int
    level: Level
    cost: Interval


@final
@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What was measured; `verdict` says what it means."""

    model: str
    data: str
    networks: str
    documents: int
    tokens: int
    seed: int
    channels: int
    """Of all layers that were looked at."""
    whole: Level
    """Nothing silenced."""
    lesion: Lesion
    """All the networks that were asked about, together."""
    share: float
    """Of the channels of each layer, drawn by chance to compare with."""
    larger: Versus
    """The same lesion beside random masks of that share."""
    each: tuple[Lesion, ...] = ()
    """The networks one by one."""
    preserve: tuple[KeepOnlyResult, ...] = ()

    def verdict(self) -> str:
        """Return whether the networks matter more than random ones, in a few sentences."""
        result, versus = self.lesion, self.lesion.equal
        what = (
            f"ablating {_components(result.components)}, {result.channels:,} of {self.channels:,} "
            f"channels ({result.channels / self.channels:.1%}), adds {result.cost} nats per token. "
            f"This differs by {versus.difference} from random masks with the same number of "
            "channels per layer"
        )
        count = len(versus.masks)
        rank = "all" if versus.at_least == 0 else f"{count - versus.at_least} of"
        known = (
            f"The loss is higher than with {rank} {count} random masks "
            f"(two-sided p = {versus.p:.3f})"
        )
        if count < versus.fewest_masks:
            known += (
                f". A test at {SIGNIFICANT:.0%} needs at least {versus.fewest_masks} random masks; "
                f"write --random {versus.fewest_masks}"
            )
        match versus.answer:
            case "more":
                meaning = "These networks matter more than random ones of the same size"
            case "less":
                meaning = "These networks matter less than random ones of the same size"
            case _:
                meaning = "These networks do not differ significantly from random ones"
        return f"{meaning}: {what}. {known}."

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def save_ablation(ablation: Ablation, path: Path) -> None:
    """Write an ablation; a file of that name is replaced only once all is written."""
    replace_file(path, (strict_json.dumps(ablation.to_json(), indent=1) + "\n").encode())


def load_ablation(path: Path) -> Ablation:
    """Read what `save_ablation` wrote."""
    try:
        value = strict_json.loads(read_plain(path).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (json.JSONDecodeError, UnicodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise ConfigError(
            f"{path} is not an ablation. Use a file written by `narrowcast ica ablate`."
        )
    try:
        return _read(value, Ablation)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a complete ablation ({error!r}). Run `narrowcast ica ablate` again."
        ) from None


def _read(value: Any, kind: type[_Value]) -> _Value:
    """Make a value of plain data by its types."""
    if get_origin(kind) is tuple:
        return kind(_read(each, get_args(kind)[0]) for each in value)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if set(value) != set(hints):
            raise ValueError(f"{kind.__name__} has {', '.join(sorted(value))}")
        return kind(**{name: _read(value[name], hint) for name, hint in hints.items()})
    if kind is float and isinstance(value, str | int | float) and not isinstance(value, bool):
        return float(value)  # type: ignore[return-value]  # words stand for what is not finite
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _components(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"components {numbers[0]} to {numbers[-1]}"
    return f"component{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
