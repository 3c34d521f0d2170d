"""One update of a run's weights by the optimizer's own step, whichever of torch's it is.

With a lookahead point the optimizer has z in the place of its weights. The lost-update meter counts
the weights, in an even sample, with a gradient that is not zero and no change in any tensor.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.numerics import BF16
from narrowcast.precision.dtensor import as_sharded, local_part
from narrowcast.precision.products.modes import EmulatedProducts
from narrowcast.precision.weights.lookahead import LookaheadPoint
from narrowcast.precision.weights.master import MasterWeights, in_buckets, is_torchs, multiply

SAMPLE = 16384
"""Elements looked at per tensor: the share is then known to about one part in a hundred."""


class LostUpdates:
    """One measurement, begun before an optimizer step and ended after it."""

    def __init__(self, stored: Sequence[tuple[Tensor, ...]], gradients: Sequence[Tensor]) -> None:
        self._stored = stored
        self._before = [tuple(_sample(t).clone() for t in tensors) for tensors in stored]
        self._moving = [_sample(gradient) != 0 for gradient in gradients]

    def share(self) -> Tensor:
        """Return lost over due, on the device; 0 if nothing was due."""
        return share_lost(self.counts())

    def counts(self) -> Tensor:
        """Return how many updates were lost, and how many were due, of those looked at."""
        lost, due = [], []
        for tensors, before, moving in zip(self._stored, self._before, self._moving, strict=True):
            same = moving
            for now, then in zip(tensors, before, strict=True):
                same = same & (_sample(now) == then)
            lost.append(same.sum())
            due.append(moving.sum())
        return torch.stack([torch.stack(lost).sum(), torch.stack(due).sum()])


def share_lost(counts: Tensor) -> Tensor:
    """Return lost over due updates, from how many there are of both; 0 if none was due."""
    return counts[0] / counts[1].clamp(min=1)


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // SAMPLE)
    # A stride that divides a row would look at the same few columns of every row.
    while math.gcd(stride, flat.numel()) > 1:
        stride -= 1
    return flat[::stride]


@final
class LeadingStep:
    """Replaces `optimizer.step()`, also for some weights at a time, at `places` among all.

    Where `finite` is false, weights and leads stay bit-identical. Does not synchronise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        point: LookaheadPoint,
        places: Mapping[nn.Parameter, int],
        *,
        finite: Tensor | None,
        metered: bool,
    ) -> None:
        self._optimizer, self._point, self._places = optimizer, point, places
        self._finite, self._metered = finite, metered
        self._counts: list[Tensor] = []

    def __call__(self) -> None:
        """Step the weights that the optimizer has gradients of now."""
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        moving = [p for p in held if p.grad is not None]
        weights = [local_part(p) for p in moving]
        leads = [local_part(self._point.lead(self._places[p])) for p in moving]
        before = [weight.clone() for weight in weights]
        torch._foreach_add_(weights, _widened(leads, weights))
        meter = None
        if self._metered:
            gradients = [local_part(p.grad) for p in moving if p.grad is not None]
            meter = LostUpdates([(weight,) for weight in weights], gradients)
        stepped = False
        try:
            self._optimizer.step()
            stepped = True
        finally:
            if not stepped:
                torch._foreach_copy_(weights, before)
        if meter is not None:
            self._counts.append(meter.counts())
        with torch.no_grad():
            for bucket in in_buckets(range(len(weights)), weights):
                some = ([tensors[i] for i in bucket] for tensors in (weights, leads, before))
                self._lead(*some)

    def lost(self) -> Tensor | None:
        """Return the share of lost updates so far, if it is measured."""
        return share_lost(torch.stack(self._counts).sum(0)) if self._counts else None

    def _lead(self, weights: list[Tensor], leads: list[Tensor], before: list[Tensor]) -> None:
        """Replace z, which the optimizer left in the weights, by y, and update the leads."""
        if not weights:
            return
        ahead = self._point.ahead
        answers = torch._foreach_mul(_widened(leads, weights), -ahead.back)
        torch._foreach_add_(answers, before)
        way = torch._foreach_sub(weights, answers)
        torch._foreach_mul_(way, ahead.left)
        # Subtracted as it is kept: so the sum of both is z, whatever is rounded of the lead.
        stored = [lead.to(old.dtype) for lead, old in zip(way, leads, strict=True)]
        after = list(torch._foreach_sub(weights, _widened(stored, weights)))
        if self._finite is not None:
            finite = self._finite
            stored = [torch.where(finite, a, b) for a, b in zip(stored, leads, strict=True)]
            after = [torch.where(finite, a, b) for a, b in zip(after, before, strict=True)]
        torch._foreach_copy_(weights, after)
        torch._foreach_copy_(leads, stored)


def _widened(leads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    return [lead.to(weight.dtype) for lead, weight in zip(leads, weights, strict=True)]


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
    """Whether the products of the optimizer itself (Adafactor) are emulated."""

    def step(
        self, factors: Mapping[nn.Parameter, Tensor], *, finite: Tensor | None, metered: bool
    ) -> Tensor | None:
        """Multiply gradients by `factors` and step; return the share of lost updates if metered."""
        meter = leading = None
        if self.lookahead is not None:
            places = {self._held(p): i for i, p in enumerate(self.weights)}
            leading = LeadingStep(
                self.optimizer, self.lookahead, places, finite=finite, metered=metered
            )
        elif metered:
            moving = [p for p in self.weights if p.grad is not None]
            gradients = [local_part(p.grad) for p in moving if p.grad is not None]
            meter = LostUpdates([self._stored(p) for p in moving], gradients)
        if factors:
            # Gradients of 16 bits are widened first: in fp16 they would vanish without the scale.
            multiply({p: f for p, f in factors.items() if not self.masters.widens(p)})
        with torch.enable_grad(), self._products(), _skip_if_not_finite(self.optimizer, finite):
            self.masters.step(self.optimizer, factors, leading or self._step)
        if leading is not None:
            return leading.lost()
        return None if meter is None else meter.share()

    def _step(self) -> None:
        """Step the optimizer, once per device mesh: torch takes no lists of mixed weights."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        meshes = dict.fromkeys(_mesh(p) for params in groups for p in params)
        if len(meshes) == 1 or not is_torchs(self.optimizer):
            self.optimizer.step()
            return
        try:
            for mesh in meshes:
                for group, params in zip(self.optimizer.param_groups, groups, strict=True):
                    group["params"] = [p for p in params if _mesh(p) == mesh]
                self.optimizer.step()
        finally:
            for group, params in zip(self.optimizer.param_groups, groups, strict=True):
                group["params"] = params

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
        stored = (weight,) if location is None else self.masters.stored(location)
        return tuple(map(local_part, stored))


def _mesh(weight: Tensor) -> Any:
    sharded = as_sharded(weight)
    return None if sharded is None else sharded.device_mesh


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
    """Set the attributes through which torch's GradScaler makes a fused optimizer skip."""
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
