"""What is taken apart, and what it is shown: the same questions for toys and language models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.training.task import MapDataset
from narrowcast.workloads.decompose.settings import (
    DecomposeData,
    DecompositionSection,
    TargetSection,
)
from narrowcast.workloads.decompose.targets.language import Language, language_target
from narrowcast.workloads.decompose.targets.toy import Toy, Truth
from narrowcast.workloads.decompose.targets.toys import toy_target
from narrowcast.workloads.decompose.targets.windows import Numbered

GIVEN = "given"
"""Of a batch: tokens, or as many places as samples are to be drawn."""


class Subject(Protocol):
    """A frozen target with its data."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def target(self) -> nn.Module:
        """The network."""

    @property
    def output(self) -> str | None:
        """What of its result is compared."""

    @property
    def divergence(self) -> Literal["mse", "kl"]:
        """How outputs are compared unless the recipe says."""

    @property
    def batch_dim(self) -> int:
        """Along which a batch holds one example after another."""

    @property
    def unit(self) -> str:
        """What positions of a batch are."""

    @property
    def sites(self) -> Mapping[str, int]:
        """Sites that it is known to have, with their components."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Sites whose weight is that of another, transposed."""

    @property
    def train_data(self) -> MapDataset:
        """What is trained on."""

    @property
    def length(self) -> int:
        """Positions of one example."""

    @property
    def digest(self) -> str:
        """Another one for other data."""

    def shown(self, inputs: Tensor) -> Tensor:
        """Return what the target is called with, of what a batch holds."""

    def judged_on(self, number: int, count: int) -> Tensor:
        """Return the batch of that number, of so many examples, that a decomposition is judged on.

        Where it is drawn, from the generator of the device as that stands.
        """


@final
@dataclass(frozen=True)
class Places:
    """As many places as a batch has: a toy's samples are drawn on the device, in the loss."""

    count: int

    def __len__(self) -> int:
        """Return how many there are: one batch."""
        return self.count

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return so many places."""
        return {GIVEN: torch.zeros(len(indices), dtype=torch.uint8)}


@final
@dataclass(frozen=True)
class Windows:
    """Windows of tokens as batches have them."""

    windows: Numbered

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.windows)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the windows of these numbers."""
        return {GIVEN: self.windows.__getitems__(indices)}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ToySubject:
    """Toy networks of every seed, that draw their samples."""

    toy: Toy
    batch_size: int
    seed: int
    output: None = None
    batch_dim: int = 1
    unit: str = "sample"

    @property
    def name(self) -> str:
        """The toy's."""
        return self.toy.name

    @property
    def length(self) -> int:
        """The toy's."""
        return self.toy.length

    @property
    def target(self) -> nn.Module:
        """Networks of all seeds."""
        return self.toy.target

    @property
    def divergence(self) -> Literal["mse", "kl"]:
        """The toy's."""
        return self.toy.divergence

    @property
    def sites(self) -> Mapping[str, int]:
        """The toy's."""
        return self.toy.sites

    @property
    def tied(self) -> Mapping[str, str]:
        """The toy's."""
        return self.toy.tied

    @property
    def truth(self) -> Mapping[str, Truth]:
        """What is known of the components of a site."""
        return self.toy.truth

    @property
    def train_data(self) -> MapDataset:
        """Places: what stands there is drawn."""
        return Places(self.batch_size)

    @property
    def digest(self) -> str:
        """The name and the seed: there is no other data."""
        return f"{self.toy.name}, drawn from seed {self.seed}"

    def shown(self, inputs: Tensor) -> Tensor:
        """Draw samples."""
        return self.toy.draw(inputs.shape[0])

    def judged_on(self, number: int, count: int) -> Tensor:
        """Draw samples."""
        return self.toy.draw(count)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageSubject:
    """A language model and its text."""

    language: Language
    length: int
    device: torch.device
    divergence: Literal["mse", "kl"] = "kl"
    batch_dim: int = 0
    unit: str = "token"
    sites: Mapping[str, int] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's."""
        return self.language.name

    @property
    def target(self) -> nn.Module:
        """The model."""
        return self.language.target

    @property
    def output(self) -> str | None:
        """Its logits."""
        return self.language.output

    @property
    def train_data(self) -> MapDataset:
        """Windows of text."""
        return Windows(self.language.train)

    @property
    def digest(self) -> str:
        """Of the tokens."""
        return self.language.digest

    def shown(self, inputs: Tensor) -> Tensor:
        """Return the tokens as they are."""
        return inputs

    def judged_on(self, number: int, count: int) -> Tensor:
        """Return windows that were held out; of few, some again."""
        windows = self.language.held_out
        numbers = [(number * count + each) % len(windows) for each in range(count)]
        return windows.__getitems__(numbers).to(self.device)


def build_subject(recipe: Recipe, *, device: torch.device) -> ToySubject | LanguageSubject:
    """Make the target that a recipe names, with its data; on the meta device only its shapes."""
    requested, data = recipe.section(TargetSection), recipe.section(DecomposeData)
    settings = recipe.section(DecompositionSection)
    if not requested.toy:
        if settings.seeds > 1:
            raise ConfigError(
                f"decomposition.seeds must be 1 for a language model, got {settings.seeds}. "
                "Several seeds are only for toys."
            )
        language = language_target(
            requested.path, text=data.text, length=data.length, device=device
        )
        return LanguageSubject(language=language, length=data.length, device=device)
    _check_no_text(requested.toy, data)
    toy = toy_target(
        requested.toy,
        seeds=settings.seeds,
        seed=recipe.seed,
        device=device,
        steps=requested.pretrain_steps,
        batch_size=requested.pretrain_batch_size,
    )
    return ToySubject(toy=toy, batch_size=recipe.batch_size, seed=recipe.seed)


def _check_no_text(toy: str, data: DecomposeData) -> None:
    for name in ("text", "length"):
        if getattr(data, name) != DecomposeData.model_fields[name].default:
            raise ConfigError(
                f"data.{name} cannot be set with model.toy={toy}, which generates its own samples. "
                f"Leave data.{name} out, or write model.path=FOLDER instead of model.toy."
            )


def as_batch(batch: Mapping[str, Any]) -> Tensor:
    """Return what a batch holds for the target."""
    inputs = batch[GIVEN]
    assert isinstance(inputs, Tensor)
    return inputs
