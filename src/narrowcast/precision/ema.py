"""An exponential moving average of the weights, in fp32, that stands still on a skipped step."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class WeightAverage:
    """The averages, beside the model, in the order of its parameters."""

    def __init__(self, values: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.averages = [value.detach().float().clone() for value in values]

    def update(self, values: Sequence[Tensor], finite: Tensor) -> None:
        """Move towards the weights, unless the step was skipped. Does not wait for the device."""
        share = (1 - self.decay) * finite.to(torch.float32)
        for average, value in zip(self.averages, values, strict=True):
            average += share * (value.float() - average)

    @contextlib.contextmanager
    def in_place_of(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let the model use the averages inside the block."""
        kept = [p.detach().clone() for p in parameters]
        try:
            for parameter, average in zip(parameters, self.averages, strict=True):
                parameter.detach().copy_(average)
            yield
        finally:
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.detach().copy_(value)
