"""A training step, and the base class of the terms of its loss."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowcast.workloads.decompose.components.decomposition import Decomposition, Passed
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.importance.squash import Sampling
from narrowcast.workloads.decompose.losses.divergence import (
    Divergence,
    divergence,
    squared_errors,
)
from narrowcast.workloads.decompose.settings import Term


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """A batch with the target's output, the importances, and how outputs are compared."""

    decomposition: Decomposition
    args: tuple[Any, ...]
    """Arguments of the target."""
    batch_dim: int = 0
    """Batch dimension of the tensors in `args`."""
    target: Tensor
    """The target's output."""
    inputs: Sequence[Tensor] = ()
    """Inputs of the sites in the target's own pass, if it cached them."""
    lower: Sequence[Tensor]
    """Importances that make masks, (seeds, rows, components) per site."""
    upper: Sequence[Tensor]
    """Importances for the minimality losses."""
    progress: Tensor
    """Share of the run that is done, on the device."""
    divergence: Divergence
    sampling: Sampling = "continuous"
    delta: bool = True
    """Whether masked passes include the weight residual."""
    state: Mapping[str, nn.Module] = field(default_factory=dict)
    """State that a term keeps between steps, by its name."""
    held: bool = False
    """Whether components are constants in this step's passes."""

    @property
    def seeds(self) -> int:
        """How many decompositions are trained at once."""
        return self.lower[0].shape[0]

    @property
    def rows(self) -> int:
        """Positions per seed."""
        return self.lower[0].shape[1]

    def hold(self) -> "Step":
        """Return the step with constant components and importances, to move sources only."""
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
        cache = "inputs" if inputs else "none"
        passed: Passed = self.decomposition(
            *args, masks=masks, cache=cache, frozen=self.held, seed=seed
        )
        return passed

    def output_divergence(self, output: Tensor, *, copies: int = 1) -> Tensor:
        """Return how far the output of a pass is from the target's, per seed."""
        return divergence(*self._compared(output, copies), self.divergence)

    def squared_errors(self, output: Tensor, *, copies: int) -> Tensor:
        """Return the mean squared error of every copy of the batch, (seeds, copies)."""
        return squared_errors(*self._compared(output, copies))

    def _compared(self, output: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        width = output.shape[-1]
        made = output.reshape(self.seeds, copies, -1, width)
        return made, self.target.reshape(self.seeds, -1, width)

    def _repeated(self, arg: Any, copies: int) -> Any:
        if copies == 1 or not isinstance(arg, Tensor) or arg.dim() <= self.batch_dim:
            return arg
        return torch.cat([arg] * copies, self.batch_dim)


class Loss(Term, ABC):
    """A term of the loss: its settings, and how it is computed."""

    kind: ClassVar[str]
    coefficient: float

    @property
    def name(self) -> str:
        """Its name in records, as in recipes."""
        return self.kind

    @abstractmethod
    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the term without its coefficient, per seed; an adversary makes `ascents` steps."""
