"""How many components are important, made smooth enough to descend."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.losses.divergence import wide
from narrowcast.workloads.decompose.losses.powers import power_means
from narrowcast.workloads.decompose.losses.terms import Loss, Step
from narrowcast.workloads.decompose.terms import EPSILON


@dataclass(frozen=True, kw_only=True)
class _Annealed(Loss):
    """A penalty of each importance, summed over components, whose shape changes in the run."""

    anneal_from: float = 0.0
    """Share of the run after which the penalty begins to change."""
    anneal_to: float = 1.0
    """Share of the run at which it has its last shape."""
    beta: float = 0.0
    """Weight of the frequency term, which presses harder on components that many rows need."""
    reference_rows: int | None = None
    """Rows that the frequency term counts as if there were; by default those there are."""

    def check(self) -> None:
        """Refuse shares out of order, and negative weights."""
        if not 0 <= self.anneal_from < self.anneal_to <= 1:
            raise ConfigError(
                f"{self.kind}: anneal_from must be below anneal_to, both as shares of the run, got "
                f"{self.anneal_from} and {self.anneal_to}. Write e.g. 0.0 and 1.0."
            )
        if self.beta < 0 or (self.reference_rows is not None and self.reference_rows < 1):
            raise ConfigError(
                f"{self.kind}: beta must be at least 0 and reference_rows at least 1, got "
                f"{self.beta} and {self.reference_rows}."
            )
        if self.reference_rows is not None and not self.beta:
            raise ConfigError(
                f"{self.kind}: reference_rows is only for the frequency term. Write a beta, or "
                "leave it out."
            )

    def between(self, first: float, last: float, progress: Tensor) -> Tensor:
        """Return the number on the way from `first` to `last` at this point of the run."""
        way = (progress - self.anneal_from) / (self.anneal_to - self.anneal_from)
        return first + (last - first) * way.clamp(0, 1)

    def summed(self, step: Step, means: Tensor) -> Tensor:
        """Return the sum of means over rows, (seeds, components), with their frequency term."""
        if self.beta:
            often = means * (self.reference_rows or step.rows)
            means = means + self.beta * means * torch.log2(1 + often)
        return means.sum(-1)


@dataclass(frozen=True, kw_only=True)
class Minimality(_Annealed):
    """Importances to a power p: at 1 their sum, near 0 their number."""

    kind: ClassVar[str] = "minimality"
    p: float = 1.0
    p_final: float | None = None
    """What `p` becomes, in a straight line; by default it stays."""
    epsilon: float = EPSILON
    """Added to importances before they are raised. With a power well below 1 the slope of those
    near 0 is p · epsilon^(p − 1) at most: with a larger epsilon, they cannot drown all others."""

    def check(self) -> None:
        """Refuse powers that are no penalty."""
        super().check()
        if not 0 < self.epsilon < 1:
            raise ConfigError(
                f"{self.kind}: epsilon must be above 0 and below 1, got {self.epsilon:g}. Write "
                "1e-12, as published, or 1e-2 if p goes well below 1."
            )
        if self.p <= 0 or (self.p_final is not None and self.p_final <= 0):
            raise ConfigError(f"{self.kind}: p and p_final must be above 0. Write e.g. p: 1.0.")
        if self.p_final is None and (self.anneal_from, self.anneal_to) != (0.0, 1.0):
            raise ConfigError(f"{self.kind}: annealing needs a p_final. Write p_final.")

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the sum over sites and components of mean powers."""
        power: float | Tensor = self.p
        if self.p_final is not None:
            power = self.between(self.p, self.p_final, step.progress)
        return self.summed(step, power_means(step.upper, power, self.epsilon))


@dataclass(frozen=True, kw_only=True)
class SmoothL0(_Annealed):
    """u²/(u² + γ²) of an importance u: nearly 1 for those well above γ, nearly 0 below."""

    kind: ClassVar[str] = "smooth_l0"
    gamma: float = 1.0
    gamma_final: float = 0.01
    """What `gamma` becomes, in a straight line."""

    def check(self) -> None:
        """Refuse widths of nothing."""
        super().check()
        if min(self.gamma, self.gamma_final) <= 0:
            raise ConfigError(
                f"{self.kind}: gamma and gamma_final must be above 0. Write e.g. gamma: 1.0."
            )

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the smooth count of important components, a mean over rows."""
        width = self.between(self.gamma, self.gamma_final, step.progress).square()
        squares = [wide(upper).square() for upper in step.upper]
        means = [(each / (each + width.to(each.dtype))).mean(1) for each in squares]
        return self.summed(step, torch.cat(means, -1))
