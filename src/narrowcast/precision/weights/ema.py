"""An exponential moving average of the weights, in fp32, that stands still on a skipped step.

It moves towards what is kept of each weight once the weight was updated. Where the fused
optimizer updates a weight, it moves the average in the same pass, at 8 bytes per weight; `update`
is for all other weights. One of them is a weight without a gradient in this step: it stays, and its
average comes nearer to it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from narrowcast.precision.dtensor import local_part
from narrowcast.precision.weights.master import in_buckets

Full = Callable[[nn.Parameter], Tensor]
"""Returns a weight with every digit that is kept of it."""


class WeightAverage:
    """The averages, beside the model, in the order of its parameters.

    They are the same tensors for as long as the run lasts: captured steps know their addresses.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], full: Full, *, decay: float) -> None:
        self._parameters = list(parameters)
        self._places = {p: i for i, p in enumerate(parameters)}
        self.share = 1 - decay
        """The part of its way to the weight that an average goes in a step."""
        # In memory as the weights lie, so that one pass can go over both.
        self.averages = [
            torch.empty_like(p.detach(), dtype=torch.float32).copy_(full(p)) for p in parameters
        ]

    def of(self, weight: nn.Parameter) -> Tensor | None:
        """Return the average of a weight; None of one that has none."""
        index = self._places.get(weight)
        return None if index is None else self.averages[index]

    def update(self, places: Sequence[int], full: Full, *, finite: Tensor | None) -> None:
        """Move the averages in these places towards their weights, unless `finite` is false.

        Does not wait for the device. Two fp32 copies of some of the weights exist for a moment.
        """
        if not places:
            return
        share = self.share if finite is None else self.share * finite.to(torch.float32)
        for bucket in in_buckets(places, self._parameters):
            # Element by element, so that each device can see to its own shard.
            averages = [local_part(self.averages[i]) for i in bucket]
            values = [local_part(full(self._parameters[i])).float() for i in bucket]
            way = torch._foreach_sub(values, averages)
            torch._foreach_mul_(way, share)
            torch._foreach_add_(averages, way)
