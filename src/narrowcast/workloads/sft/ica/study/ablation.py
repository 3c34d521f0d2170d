"""Results of an ablation; needs neither torch nor numpy, so that reports can read them."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from narrowcast.errors import ConfigError
from narrowcast.plain_files import read_plain
from narrowcast.runs import strict_json
from narrowcast.workloads.sft.ica.networks import listed
from narrowcast.workloads.sft.ica.networks_file import read_typed

FORMAT = "narrowcast.ablation.1"
SIGNIFICANT = 0.05
Answer: TypeAlias = Literal["more", "less", "not shown"]


@final
@dataclass(frozen=True, kw_only=True)
class Level:
    """Next-token loss and accuracy."""

    loss: float
    """Nats per token."""
    accuracy: float


@final
@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@final
@dataclass(frozen=True, kw_only=True)
class Versus:
    """An ablation compared with random masks."""

    channels: int
    """Per random mask."""
    masks: tuple[Level, ...]
    difference: Interval
    """Loss minus the mean loss of the random masks."""
    at_least: int
    """Random masks with at least this loss."""
    at_most: int
    """Random masks with at most this loss."""
    tests: int = 1
    """Tests that p is corrected for."""

    @property
    def p(self) -> float:
        """Two-sided p of the rank among random masks, times the number of tests (Bonferroni)."""
        rank = 1 + min(self.at_least, self.at_most)
        return min(1.0, 2 * self.tests * rank / (1 + len(self.masks)))

    @property
    def fewest_masks(self) -> int:
        """Random masks needed to reach significance."""
        return math.ceil(2 * self.tests / SIGNIFICANT) - 1

    @property
    def mean_loss(self) -> float:
        return sum(level.loss for level in self.masks) / len(self.masks)

    @property
    def answer(self) -> Answer:
        """Whether the loss is significantly higher or lower than with random masks."""
        if self.p > SIGNIFICANT:
            return "not shown"
        if self.difference.low > 0 and self.at_least < self.at_most:
            return "more"
        below = self.difference.high < 0 and self.at_most < self.at_least
        return "less" if below else "not shown"


@final
@dataclass(frozen=True, kw_only=True)
class Lesion:
    """Silenced networks."""

    components: tuple[int, ...]
    channels: int
    level: Level
    cost: Interval
    """Loss above that of the full model."""
    equal: Versus
    """Against random masks with as many channels per layer."""


@final
@dataclass(frozen=True, kw_only=True)
class KeepOnlyResult:
    """Only the first networks kept."""

    components: int
    channels: int
    level: Level
    cost: Interval


@final
@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Results of an ablation."""

    model: str
    data: str
    networks: str
    documents: int
    tokens: int
    seed: int
    channels: int
    """Analysed channels."""
    whole: Level
    """The full model."""
    lesion: Lesion
    """All requested networks together."""
    share: float
    """Share of channels in the larger random masks."""
    larger: Versus
    """The same lesion against random masks of that share."""
    each: tuple[Lesion, ...] = ()
    """Single networks."""
    preserve: tuple[KeepOnlyResult, ...] = ()

    def verdict(self) -> str:
        """Return the conclusion in a few sentences."""
        result, versus = self.lesion, self.lesion.equal
        many = "s" * (len(result.components) > 1)
        named = f"component{many} {listed(result.components)}"
        what = (
            f"ablating {named}, {result.channels:,} of {self.channels:,} "
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
        return {"format": FORMAT, **dataclasses.asdict(self)}


def load_ablation(path: Path) -> Ablation:
    """Read a file of `narrowcast ica ablate`."""
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
        ablation: Ablation = read_typed(value, Ablation, "")
    except ConfigError as error:
        raise ConfigError(
            f"{path} is not a complete ablation: {error} Run `narrowcast ica ablate` again."
        ) from None
    return ablation
