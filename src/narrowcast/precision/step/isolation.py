"""What leaves no trace: passes, whose gradients and buffers are put back, and what has failed."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from narrowcast.precision.dtensor import replace_values
from narrowcast.precision.modules.rewrite import set_grad_dtype
from narrowcast.precision.swap import restore
from narrowcast.precision.weights.copies import show_as_it_is
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.trained import TrainedWeights


@contextlib.contextmanager
def preserve_grads_and_buffers(
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
def undone_on_failure(model: nn.Module, weights: TrainedWeights) -> Iterator[None]:
    """Give model and optimizer back as they were where the block fails: out of memory, say.

    What they held is kept until then and put back, so that no memory is needed for it.
    """
    tensors = [(p, p.data, p.grad, p.grad_dtype) for p in weights.all]
    optimizers = member_optimizers(weights.optimizer)
    groups = [(group, group["params"]) for each in optimizers for group in each.param_groups]
    states = [
        (each.state, [(key, held, dict(held)) for key, held in each.state.items()])
        for each in optimizers
    ]
    try:
        yield
    except BaseException:
        weights.let_go()
        restore(model)
        for p, value, gradient, dtype in tensors:
            p.grad = None
            show_as_it_is(p)
            replace_values(p, value)
            set_grad_dtype(p, dtype)
            p.grad = gradient
        for group, params in groups:
            group["params"] = params
        for state, entries in states:
            state.clear()
            for key, held, values in entries:
                held.clear()
                held.update(values)
                state[key] = held
        raise
