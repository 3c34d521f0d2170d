"""What leaves no trace: passes, whose gradients and buffers are put back, and what has failed."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from narrowcast.precision.step.buffers import BufferFormats
from narrowcast.precision.weights.trained import TrainedWeights


@contextlib.contextmanager
def grads_and_buffers_kept(
    model: nn.Module, weights: Iterable[nn.Parameter] = ()
) -> Iterator[None]:
    """Begin the block without gradients; give gradients and buffers back afterwards, bit for bit.

    `weights` are some that need not be the model's. What a module keeps elsewhere, in attributes of
    its own, is not known here.
    """
    gradients = [(p, p.grad) for p in {*model.parameters(), *weights}]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # a module may have put another in its place
                # As `.data`: this is no change that anybody must know of.
                buffer.data.copy_(value)


@contextlib.contextmanager
def undone_on_failure(weights: TrainedWeights, formats: BufferFormats) -> Iterator[None]:
    """Give model and optimizer back as they were where the block fails: out of memory, say."""
    gradients = [(p, p.grad) for p in weights.all]
    try:
        yield
    except BaseException:
        weights.restore()
        formats.give_back()
        for p, gradient in gradients:
            p.grad = gradient
        raise
