"""What a step did: applied or skipped, and why; known to the host only once it asks.

On a GPU the facts of a step (finite, norm, scale, lost updates) travel to the host in one small
copy that nothing waits for. Reading an `Outcome` waits; not reading it costs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.hardware.async_copy import AsyncCopy

NO_MODULE = "no single module (the sum of all gradients overflowed)"
"""In the place of a module's name."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The numbers of one step, as the host knows them."""

    finite: bool
    grad_norm: float
    loss_scale: float
    next_scale: float
    lost_updates: float | None
    lr: float
    at_floor: bool
    """No loss scale could have given way to an overflow in this step."""
    bad_parameters: tuple[str, ...]
    """Names of those whose gradients were not finite, from input to output."""

    @property
    def bad_module(self) -> str:
        """The module among them that is nearest the loss."""
        if not self.bad_parameters:
            return NO_MODULE
        last = self.bad_parameters[-1]
        return last.rpartition(".")[0] or last


def pack(
    *,
    finite: Tensor,
    norm: Tensor,
    scale: Tensor,
    next_scale: Tensor,
    lost: Tensor | None,
    at_floor: Tensor,
    norms: Tensor,
) -> Tensor:
    """Return the numbers of one step as one tensor, on the device."""
    unmeasured = torch.zeros_like(norm)
    numbers = [finite, norm, scale, next_scale, unmeasured if lost is None else lost, at_floor]
    return torch.cat([torch.stack([n.detach().float() for n in numbers]), norms])


class Flight:
    """The numbers of one step on their way from the device, as `pack` made them."""

    def __init__(self, packed: Tensor, *, names: Sequence[str], lr: float, metered: bool) -> None:
        self._names, self._lr, self._metered = names, lr, metered
        self._packed = AsyncCopy(packed)
        self.applied_on_device = packed[0] != 0

    def land(self) -> Facts:
        """Return the numbers. Waits for the device."""
        finite, norm, scale, next_scale, lost, at_floor, *norms = self._packed.wait().tolist()
        bad = []
        if not finite:
            bad = [
                name
                for name, value in zip(self._names, norms, strict=True)
                if not abs(value) < float("inf")
            ]
        return Facts(
            finite=bool(finite),
            grad_norm=norm,
            loss_scale=scale,
            next_scale=next_scale,
            lost_updates=lost if self._metered and finite else None,
            lr=self._lr,
            at_floor=bool(at_floor),
            bad_parameters=tuple(bad),
        )


@dataclass(kw_only=True)
class Outcome:
    """One step's outcome. Every property but `step` waits for the device."""

    step: int
    applied_on_device: Tensor = field(repr=False)
    """Whether the weights moved, where nothing has to wait for it; read before the next step."""
    sync: Callable[[], None] = field(repr=False)
    """Makes the host catch up with the device, this step included."""
    _known: tuple[Facts, str] | None = field(default=None, repr=False)

    @property
    def applied(self) -> bool:
        """Whether the weights moved."""
        return self._facts.finite

    @property
    def why(self) -> str:
        """Why the step was skipped; empty where it was applied."""
        self._facts  # noqa: B018  # waits, so that the text is there
        assert self._known is not None
        return self._known[1]

    @property
    def loss_scale(self) -> float:
        """The scale the loss was multiplied by."""
        return self._facts.loss_scale

    @property
    def next_scale(self) -> float:
        """The scale the loss of the next step is multiplied by."""
        return self._facts.next_scale

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients, unscaled, before clipping."""
        return self._facts.grad_norm

    @property
    def lost_updates(self) -> float | None:
        """The share of weights whose update rounded to nothing; None where it was not measured."""
        return self._facts.lost_updates

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group in this step."""
        return self._facts.lr

    @property
    def _facts(self) -> Facts:
        if self._known is None:
            self.sync()
        assert self._known is not None
        return self._known[0]
