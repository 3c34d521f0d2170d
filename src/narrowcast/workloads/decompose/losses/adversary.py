"""Adversaries: what is not important takes part in the way that does most harm.

How hard they search is a budget that may change in the course of a run: fewer steps early, when
everything does harm, and only at every k-th step of training. Each budget is another form of the
training step, known before it begins.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.mask import Source
from narrowcast.workloads.decompose.losses.reconstruction import Routed
from narrowcast.workloads.decompose.losses.terms import Loss, Step


@dataclass(frozen=True, kw_only=True)
class Adversarial(Routed, ABC):
    """A term whose sources ascend the divergence."""

    steps: int = 1
    """Ascents at a step of training."""
    early_steps: int | None = None
    """Ascents early in the run; by default as many as later."""
    early_until: float = 0.0
    """The share of the run that is early."""
    every: int = 1
    """The term is part of the loss at every so many steps of training."""

    def check(self) -> None:
        """Refuse budgets that are none."""
        super().check()
        fewest = self.steps if self.early_steps is None else min(self.steps, self.early_steps)
        if fewest < 1 or self.every < 1:
            raise ConfigError(
                f"{self.name}: steps, early_steps and every must be at least 1, got {self.steps}, "
                f"{self.early_steps} and {self.every}. For a term without a search, use stochastic."
            )
        if (self.early_steps is not None) != (self.early_until > 0) or self.early_until > 1:
            raise ConfigError(
                f"{self.name}: early_steps and early_until must be set together. Write e.g. "
                "early_steps: 1 and early_until: 0.5, or neither."
            )

    def ascents_at(self, step: int, steps: int) -> int:
        """Return how many ascents step `step` of `steps` makes; 0: the term is left out."""
        if step % self.every:
            return 0
        early = self.early_steps is not None and step < self.early_until * steps
        return self.early_steps if early and self.early_steps is not None else self.steps


def step_form(losses: Sequence[Loss], step: int, steps: int) -> tuple[int, ...]:
    """Return the form of a step of training, for `total`: how many ascents each term makes.

    A term without an adversary always has 1, and one that this step leaves out 0. Steps of one form
    do the same work, and one CUDA graph can hold them.
    """
    return tuple(
        loss.ascents_at(step, steps) if isinstance(loss, Adversarial) else 1 for loss in losses
    )


def all_forms(losses: Sequence[Loss], steps: int) -> set[tuple[int, ...]]:
    """Return all forms that the steps of a run have."""
    return {step_form(losses, step, steps) for step in range(steps)}


def split(values: Sequence[Tensor], step: Step) -> tuple[list[Source], list[Source | None]]:
    """Return sources of components and of what they leave, from both one after the other."""
    sites = len(step.lower)
    return list(values[:sites]), list(values[sites:]) if step.delta else [None] * sites


def shapes(step: Step, rows: int) -> list[tuple[int, ...]]:
    """Return the shapes of the values that `split` takes, for `rows` of each seed's own."""
    sources = [(step.seeds, rows, each.shape[-1]) for each in step.lower]
    return [*sources, *[(step.seeds, rows)] * (len(sources) if step.delta else 0)]


def rising(separate: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of the sum over seeds; zero where a pass does not use a value."""
    matches = torch.autograd.grad(separate.sum(), list(values), allow_unused=True)
    return tuple(
        torch.zeros_like(value) if grad is None else grad
        for value, grad in zip(values, matches, strict=True)
    )
