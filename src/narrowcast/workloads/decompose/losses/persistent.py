"""Reconstruction under sources that go on ascending from step to step.

The last ascent of a step costs nothing: the backward pass that trains the components has the
gradient of the sources too. `PersistentSources.ascend` takes it up when that pass is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.mask import Source
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.losses.adversary import Adversarial, rising, split
from narrowcast.workloads.decompose.losses.terms import Step

Scope = Literal["single", "broadcast_across_batch", "repeat_across_batch", "per_position"]

EPSILON = 1e-8
"""Of Adam: what keeps a source with no gradient where it is."""
EDGE = 1e-3
"""How near to 0 and 1 sources begin where they are the sigmoid of what ascends."""


@dataclass(frozen=True, kw_only=True)
class PersistentPGD(Adversarial):
    """Sources kept from step to step, moved by Adam or by signs."""

    kind: ClassVar[str] = "persistent_pgd"
    optimizer: Literal["adam", "sign"] = "adam"
    lr: float = 0.01
    """How far an ascent moves a source: of Adam its rate, of signs the step."""
    beta1: float = 0.5
    beta2: float = 0.99
    scope: Scope = "single"
    """Who shares a source: all rows; a position in all texts; in every so many texts; nobody."""
    repeat: int = 1
    """How many texts have sources of their own, with `repeat_across_batch`."""
    sigmoid: bool = False
    """Whether sources are the sigmoid of what ascends, rather than kept in [0, 1] by a clamp."""

    def check(self) -> None:
        """Refuse rates and moments that do not ascend."""
        super().check()
        if not (self.lr > 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError(
                f"{self.name}: lr must be above 0, and beta1 and beta2 at least 0 and below 1. "
                "Write e.g. lr: 0.01, beta1: 0.5, beta2: 0.99."
            )
        if self.optimizer == "sign" and (self.beta1, self.beta2) != (0.5, 0.99):
            raise ConfigError(
                f"{self.name}: optimizer: sign has no beta1 and beta2. Leave them out."
            )
        if self.repeat < 1 or (self.repeat > 1 and self.scope != "repeat_across_batch"):
            raise ConfigError(
                f"{self.name}: repeat must be at least 1, and needs scope: repeat_across_batch."
            )

    def sources(
        self, sites: Sequence[Site], *, seeds: int, rows: int, length: int, delta: bool
    ) -> "PersistentSources":
        """Make what the term keeps, for batches of `rows`, every `length` of them one text."""
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
        """Return the divergence under the sources; all ascents but the last are made before."""
        state = step.state[self.name]
        assert isinstance(state, PersistentSources)
        if torch.is_grad_enabled():
            for _ in range(ascents - 1):
                self._ascend(step.hold(), state)
        return self.mean(step, *state.spread(step))

    def _ascend(self, held: Step, state: "PersistentSources") -> None:
        moving = state.leaves()
        separate = self.mean(held, *state.spread(held))
        state.move(rising(separate, moving))


class PersistentSources(nn.Module):
    """Sources and what their optimizer remembers: buffers, and so part of a checkpoint."""

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
        """Return the sources of each row of a batch, and of what components leave."""
        values = self.leaves() if torch.is_grad_enabled() else map(self.get_buffer, self.names)
        if self.settings.sigmoid:
            values = [torch.sigmoid(each) for each in values]
        return split([_over(each, step.rows) for each in values], step)

    @torch.no_grad()
    def ascend(self) -> None:
        """Move the sources by the gradients of a whole backward pass, if it came by them.

        To be called when that pass is done, on the device's stream; waits for nothing.
        """
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
    """Return `value` for every row; one that all share broadcasts."""
    own = value.shape[1]
    if own in (1, rows):
        return value
    if rows % own:
        raise ConfigError(
            f"The batch must have {own} rows like the persistent masks, got {rows}. Evaluate with "
            "batches of the same size, or write scope: single."
        )
    return value.repeat(1, rows // own, *[1] * (value.dim() - 2))
