"""Adversarial terms: masks of unimportant components that ascend the divergence."""

from abc import ABC
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.masked import Source
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.importance.masks import Route
from narrowcast.workloads.decompose.losses.divergence import wide
from narrowcast.workloads.decompose.losses.reconstruction import Routed
from narrowcast.workloads.decompose.losses.terms import Loss, Step
from narrowcast.workloads.decompose.settings import Budget, PersistentBudget, PGDBudget

INITIAL: dict[str, Callable[..., Tensor]] = {
    "random": torch.rand,
    # The target itself, where no slope leads away from it.
    "ones": torch.ones,
    "zeroes": torch.zeros,
}
EPSILON = 1e-8
"""Of Adam: keeps a source without a gradient where it is."""
EDGE = 1e-3
"""Distance of initial sources from 0 and 1 if they are a sigmoid."""


class Adversarial(Routed, Budget, ABC):
    """A term whose sources ascend the divergence."""

    def ascents_at(self, step: int, steps: int) -> int:
        """Return how many ascents step `step` of `steps` makes; 0 leaves the term out."""
        if step % self.every:
            return 0
        if self.early_steps is not None and step < self.early_until * steps:
            return self.early_steps
        return self.steps


def step_form(losses: Sequence[Loss], step: int, steps: int) -> tuple[int, ...]:
    """Return how many ascents each term makes in a step: 1 without an adversary, 0 if left out."""
    return tuple(
        loss.ascents_at(step, steps) if isinstance(loss, Adversarial) else 1 for loss in losses
    )


def split(values: Sequence[Tensor], step: Step) -> tuple[list[Source], list[Source | None]]:
    """Split a list into the sources of components and those of weight residuals."""
    sites = len(step.lower)
    return list(values[:sites]), list(values[sites:]) if step.delta else [None] * sites


def initial(init: str, step: Step, rows: int) -> list[Tensor]:
    """Return the initial values that `split` takes, for `rows` rows per seed."""
    like = wide(step.lower[0][0, 0])
    shapes: list[tuple[int, ...]] = [(step.seeds, rows, each.shape[-1]) for each in step.lower]
    shapes += [(step.seeds, rows)] * (len(shapes) if step.delta else 0)
    return [INITIAL[init](shape, device=like.device, dtype=like.dtype) for shape in shapes]


def rising(separate: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of the sum over seeds; zero where a pass does not use a value."""
    grads = torch.autograd.grad(separate.sum(), list(values), allow_unused=True)
    return tuple(
        torch.zeros_like(value) if grad is None else grad
        for value, grad in zip(values, grads, strict=True)
    )


def stepped(values: Sequence[Tensor], grads: Sequence[Tensor], size: float) -> list[Tensor]:
    """Move values by the signs of their gradients, within [0, 1]."""
    both = zip(values, grads, strict=True)
    return [(value.detach() + size * grad.sign()).clamp(0, 1) for value, grad in both]


class PGD(Adversarial, PGDBudget):
    """Sources that start again at every training step and move by signs of their gradient."""

    kind: ClassVar[str] = "pgd"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        separate = [self._worst(step, route, ascents) for route in self.routes(step)]
        return torch.stack(separate).mean(0)

    def _worst(self, step: Step, route: Route, ascents: int) -> Tensor:
        values = initial(self.init, step, 1 if self.scope == "shared" else step.rows)
        held = step.hold()
        for _ in range(ascents):
            with torch.enable_grad():  # also in an evaluation
                moving = [each.requires_grad_() for each in values]
                grads = rising(self.divergence(held, route, *split(moving, step)), moving)
            values = stepped(moving, grads, self.step_size)
        return self.divergence(step, route, *split(values, step))


class PersistentPGD(Adversarial, PersistentBudget):
    """Sources kept from step to step, moved by Adam or by signs.

    The last ascent of a step is free: it uses the gradient of the training backward pass.
    """

    kind: ClassVar[str] = "persistent_pgd"

    def sources(
        self, sites: Sequence[Site], *, seeds: int, rows: int, length: int, delta: bool
    ) -> "PersistentSources":
        """Make the state of the term for batches of `rows`, each `length` of them one sample."""
        own = {
            "single": 1,
            "broadcast_across_batch": length,
            "repeat_across_batch": self.repeat * length,
            "per_position": rows,
        }[self.scope]
        if rows % own:
            raise ConfigError(
                f"losses.{self.name}.repeat must divide batch_size={rows // length}, got "
                f"{self.repeat}. Write a repeat that does, or another batch_size."
            )
        shapes: list[tuple[int, ...]] = [(seeds, own, site.components) for site in sites]
        return PersistentSources(self, [*shapes, *[(seeds, own)] * (len(sites) if delta else 0)])

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        state = step.state[self.name]
        assert isinstance(state, PersistentSources)
        if torch.is_grad_enabled():
            held = step.hold()
            for _ in range(ascents - 1):
                moving = state.leaves()
                state.move(rising(self.mean(held, *state.spread(held)), moving))
        return self.mean(step, *state.spread(step))


class PersistentSources(nn.Module):
    """Sources and the state of their optimizer: buffers, and so part of a checkpoint."""

    def __init__(self, settings: PersistentPGD, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.settings, self.names = settings, [f"source_{index}" for index in range(len(shapes))]
        for name, shape in zip(self.names, shapes, strict=True):
            begun = torch.rand(shape)
            if settings.sigmoid:
                begun = begun.clamp(EDGE, 1 - EDGE).logit()
            self.register_buffer(name, begun)
            if settings.optimizer == "adam":
                self.register_buffer(f"{name}_first", torch.zeros(shape))
                self.register_buffer(f"{name}_second", torch.zeros(shape))
        self.register_buffer("ascents", torch.zeros(()))
        self._leaves: list[Tensor] = []

    def leaves(self) -> list[Tensor]:
        """Return what ascends, as the leaves that gradients come to, the same until they move."""
        if not self._leaves:
            values = [self.get_buffer(name) for name in self.names]
            self._leaves = [value.detach().requires_grad_() for value in values]
        return self._leaves

    def spread(self, step: Step) -> tuple[list[Source], list[Source | None]]:
        """Return the sources of each row of a batch, and those of weight residuals."""
        values = self.leaves() if torch.is_grad_enabled() else map(self.get_buffer, self.names)
        if self.settings.sigmoid:
            values = [torch.sigmoid(each) for each in values]
        return split([_over(each, step.rows) for each in values], step)

    @torch.no_grad()
    def ascend(self) -> None:
        """Move the sources by the gradients of a finished backward pass, if it has them."""
        grads = [leaf.grad for leaf in self._leaves]
        matches = [grad / self.settings.coefficient for grad in grads if grad is not None]
        if matches and len(matches) == len(grads):
            self.move(matches)
        self._leaves = []

    @torch.no_grad()
    def move(self, grads: Sequence[Tensor]) -> None:
        """Move the sources up their gradients, within [0, 1]."""
        self._leaves = []
        self.get_buffer("ascents").add_(1)
        for name, grad in zip(self.names, grads, strict=True):
            value = self.get_buffer(name)
            # A pass that overflowed says nothing, and must not be remembered.
            known = grad.to(value.dtype).nan_to_num(0.0, 0.0, 0.0)
            value.add_(self.settings.lr * self._direction(name, known))
            if not self.settings.sigmoid:
                value.clamp_(0, 1)

    def _direction(self, name: str, grad: Tensor) -> Tensor:
        settings, count = self.settings, self.get_buffer("ascents")
        if settings.optimizer == "sign":
            return grad.sign()
        first = self.get_buffer(f"{name}_first").lerp_(grad, 1 - settings.beta1)
        second = self.get_buffer(f"{name}_second").lerp_(grad.square(), 1 - settings.beta2)
        first = first / (1 - settings.beta1**count)
        second = second / (1 - settings.beta2**count)
        return first / (second.sqrt() + EPSILON)


def _over(value: Tensor, rows: int) -> Tensor:
    """Repeat `value` for every row; one that all rows share broadcasts."""
    own = value.shape[1]
    if own in (1, rows):
        return value
    if rows % own:
        raise ConfigError(
            f"The batch must have {own} rows like the persistent masks, got {rows}. Evaluate with "
            "batches of the same size, or write scope: single."
        )
    return value.repeat(1, rows // own, *[1] * (value.dim() - 2))
