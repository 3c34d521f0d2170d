"""The trained model: components of a frozen target, and functions that predict importances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.importance.functions import ImportanceFunction
from narrowcast.workloads.decompose.importance.squash import Sampling, Squash, importances
from narrowcast.workloads.decompose.losses.divergence import Divergence
from narrowcast.workloads.decompose.losses.terms import Step


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How passes are made and compared, the same for every step of a run."""

    divergence: Divergence
    batch_dim: int
    """Along which a batch holds one example after another: 1 where seeds come first."""
    squash: Squash = "leaky_hard"
    sampling: Sampling = "continuous"
    delta: bool = True


class DecompositionModel(nn.Module):
    """Components of a target, importance functions, and what adversaries keep between steps."""

    def __init__(
        self,
        decomposition: Decomposition,
        importance: ImportanceFunction,
        *,
        adversaries: Mapping[str, nn.Module] | None = None,
        reading: Reading,
    ) -> None:
        super().__init__()
        self.decomposition, self.importance = decomposition, importance
        self.adversaries = nn.ModuleDict(dict(adversaries or {}))
        self.reading = reading

    @property
    def seeds(self) -> int:
        return self.decomposition.seeds

    def forward(self, x: Tensor, *, progress: Tensor | None = None) -> Step:
        """Return a training step: a batch with the target's output and the importances."""
        # Nothing of the target is trained: of this pass only the activations of components, where
        # importances are told by them, have a gradient.
        passed = self.decomposition(x, cache=self.importance.needs)
        length = 1 if x.is_floating_point() else x.shape[-1]
        logits = self.importance(passed.inputs, passed.acts, length=length)
        lower, upper = importances(logits, self.reading.squash, self.reading.sampling)
        return Step(
            decomposition=self.decomposition,
            args=(x,),
            batch_dim=self.reading.batch_dim,
            target=passed.output.detach(),
            inputs=passed.inputs,
            lower=lower,
            upper=upper,
            progress=torch.ones((), device=x.device) if progress is None else progress,
            divergence=self.reading.divergence,
            sampling=self.reading.sampling,
            delta=self.reading.delta,
            state=dict(self.adversaries.items()),
        )

    def clipped(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Return the parameters of components and of importance functions."""
        return {
            "components": list(self.decomposition.components.parameters()),
            "importance": list(self.importance.parameters()),
        }


@torch.no_grad()
def clip_each_seed(parameters: Sequence[nn.Parameter], limit: float) -> None:
    """Clip the gradients of every seed, the first dimension, by their own norm."""
    gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    squares = torch.stack([g.float().square().flatten(1).sum(1) for g in gradients])
    factor = torch.clamp(limit / (squares.sum(0).sqrt() + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)).to(gradient.dtype))
