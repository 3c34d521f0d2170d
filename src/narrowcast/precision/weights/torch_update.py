"""One update of a run's weights by the optimizer's own step, whichever of torch's it is."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.numerics import BF16
from narrowcast.precision.products.modes import EmulatedProducts
from narrowcast.precision.weights.leading_step import LeadingStep
from narrowcast.precision.weights.lookahead import LookaheadPoint
from narrowcast.precision.weights.lost_updates import LostUpdates
from narrowcast.precision.weights.master import MasterWeights, multiply


@final
@dataclass(frozen=True, kw_only=True)
class TorchUpdate:
    """The optimizer, and the weights it updates as they are kept."""

    optimizer: torch.optim.Optimizer
    weights: Sequence[nn.Parameter]
    masters: MasterWeights
    index: Mapping[nn.Parameter, int]
    """The place of each weight among the masters that has one."""
    lookahead: LookaheadPoint | None
    emulated: bool
    """Whether the optimizer's own products are emulated: one that multiplies (Adafactor) must not
    do so natively in bf16 either."""

    def step(
        self, factors: Mapping[nn.Parameter, Tensor], *, finite: Tensor | None, metered: bool
    ) -> Tensor | None:
        """Multiply gradients by `factors` and step; the optimizer skips where `finite` is false.

        Returns the share of lost updates of a sample if it is to be measured.
        """
        meter = leading = None
        if self.lookahead is not None:
            places = {self._held(p): i for i, p in enumerate(self.weights)}
            leading = LeadingStep(
                self.optimizer, self.lookahead, places, finite=finite, metered=metered
            )
        elif metered:
            moving = [p for p in self.weights if p.grad is not None]
            gradients = [p.grad for p in moving if p.grad is not None]
            meter = LostUpdates([self._stored(p) for p in moving], gradients)
        if factors:
            # Gradients of 16 bits are widened first: in fp16 they would vanish without the scale.
            multiply({p: f for p, f in factors.items() if not self.masters.widens(p)})
        with torch.enable_grad(), self._products(), _skip_if_not_finite(self.optimizer, finite):
            self.masters.step(self.optimizer, factors, leading or self.optimizer.step)
        if leading is not None:
            return leading.lost()
        return None if meter is None else meter.share()

    def _products(self) -> contextlib.AbstractContextManager[Any]:
        if self.emulated and self.masters.parameters:
            return EmulatedProducts(BF16, widen=False)
        return contextlib.nullcontext()

    def _held(self, weight: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer holds of a weight."""
        widened = self.masters.widens(weight)
        return self.masters.fp32_params[self.index[weight]] if widened else weight

    def _stored(self, weight: nn.Parameter) -> tuple[Tensor, ...]:
        location = self.index.get(weight)
        return (weight.detach(),) if location is None else self.masters.stored(location)


def gradient_factors(
    weights: Sequence[nn.Parameter], factor: Tensor | None
) -> dict[nn.Parameter, Tensor]:
    """Return what the gradient of each weight is multiplied by: one for all, or one for each."""
    if factor is None:
        return {}
    if factor.dim() == 0:
        return dict.fromkeys(weights, factor)
    return dict(zip(weights, factor.unbind(), strict=True))


@contextlib.contextmanager
def _skip_if_not_finite(optimizer: torch.optim.Optimizer, finite: Tensor | None) -> Iterator[None]:
    """Tell a fused optimizer to skip by the attributes by which torch's GradScaler does."""
    if finite is None:
        yield
        return
    info = {"grad_scale": None, "found_inf": (~finite).float()}
    vars(optimizer).update(info)
    try:
        yield
    finally:
        for name in info:
            delattr(optimizer, name)
