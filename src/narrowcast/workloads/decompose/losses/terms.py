"""What a step of training has, and what a term of its loss is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.decomposition import Decomposition, Passed
from narrowcast.workloads.decompose.components.mask import SiteMask
from narrowcast.workloads.decompose.importance.squash import Sampling
from narrowcast.workloads.decompose.losses.divergence import (
    Divergence,
    divergence,
    squared_errors,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """A batch, what the target and the importance functions made of it, and how to compare."""

    decomposition: Decomposition
    args: tuple[Any, ...]
    """What the target is called with."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_dim: int = 0
    """Along which the tensors of `args` and `kwargs` hold one example after another."""
    target: Tensor
    """The target's output."""
    inputs: Sequence[Tensor] = ()
    """Of the sites in the target's own pass, where that kept them."""
    lower: Sequence[Tensor]
    """Importances that make masks, (seeds, rows, components) of each site."""
    upper: Sequence[Tensor]
    """Importances that losses press on."""
    progress: Tensor
    """The share of the run that is done, on the device."""
    divergence: Divergence
    sampling: Sampling = "continuous"
    delta: bool = True
    """Whether what components leave of the weights takes part in masked passes."""
    state: Mapping[str, nn.Module] = field(default_factory=dict)
    """What a term keeps from step to step, by its name."""
    held: bool = False
    """Whether components are constants in this step's passes."""

    @property
    def seeds(self) -> int:
        """How many decompositions are trained at once."""
        return self.lower[0].shape[0]

    @property
    def rows(self) -> int:
        """How many positions each of them sees."""
        return self.lower[0].shape[1]

    def hold(self) -> "Step":
        """Return the step with constant components and importances, to move sources alone.

        A backward pass to the sources would otherwise compute the gradients of components too.
        """
        return replace(self, lower=[each.detach() for each in self.lower], held=True)

    def masked(
        self,
        masks: Sequence[SiteMask | None],
        *,
        copies: int = 1,
        inputs: bool = False,
        seed: Tensor | None = None,
    ) -> Passed:
        """Pass the batch, `copies` times over, through the decomposition with `masks`."""
        args = tuple(self._repeated(each, copies) for each in self.args)
        kwargs = {name: self._repeated(each, copies) for name, each in self.kwargs.items()}
        cache = "inputs" if inputs else "none"
        passed: Passed = self.decomposition(
            *args, masks=masks, cache=cache, frozen=self.held, seed=seed, **kwargs
        )
        return passed

    def output_divergence(self, output: Tensor, *, copies: int = 1) -> Tensor:
        """Return how far the output of a pass is from the target's, for every seed."""
        return divergence(*self._compared(output, copies), self.divergence)

    def squared_errors(self, output: Tensor, *, copies: int) -> Tensor:
        """Return the mean squared error of every copy of the batch, (seeds, copies)."""
        return squared_errors(*self._compared(output, copies))

    def _compared(self, output: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        width = output.shape[-1]
        made = output.reshape(self.seeds, copies, -1, width)
        return made, self.target.reshape(self.seeds, -1, width)

    def _repeated(self, settings: Any, copies: int) -> Any:
        if copies == 1 or not isinstance(settings, Tensor) or settings.dim() <= self.batch_dim:
            return settings
        return torch.cat([settings] * copies, self.batch_dim)


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """A term: how much it weighs, and how it is computed."""

    kind: ClassVar[str]
    coefficient: float
    """What it is multiplied by in the total."""

    def __post_init__(self) -> None:
        """Refuse what would make it no term, or turn it around."""
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            raise ConfigError(
                f"{self.kind}: coefficient must be a number above 0, got {self.coefficient}. To "
                "disable the loss, leave it out."
            )
        self.check()

    @property
    def name(self) -> str:
        """What it is called in records."""
        return self.kind

    def check(self) -> None:  # noqa: B027  # most kinds have nothing more to refuse
        """Refuse settings that do not go together."""

    @abstractmethod
    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the term without its coefficient, one number for every seed.

        `ascents` says how many steps an adversary takes, where the term has one.
        """
