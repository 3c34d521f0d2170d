"""A step of any torch optimizer from a lookahead point's z, which leaves y and the leads behind.

The optimizer finds z in the place of its weights, and nothing else tells it of the other points:
weight decay, moments, norms of weights are those of where it moves.
"""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.precision.dtensor import local_part
from narrowcast.precision.weights.lookahead import LookaheadPoint
from narrowcast.precision.weights.lost_updates import LostUpdates, share_lost
from narrowcast.precision.weights.master import in_buckets


@final
class LeadingStep:
    """What stands in for `optimizer.step()`, which may be called for some weights at a time.

    `places` are those of what the optimizer holds among all weights. Where `finite` is given and
    false, weights and leads stay as they are, bit for bit; nothing waits for the device. One fp32
    copy of the weights that are stepped exists meanwhile, and four of a bucket of them.
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
        """Let weights hold y in place of the z that the optimizer left, and their leads follow."""
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
