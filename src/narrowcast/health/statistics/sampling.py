"""Samples of tensors, taken where they pass through a model, forward and backward.

A sample is 4,096 values in runs of 128, evenly spaced over the tensor: 8 kB of a tensor of many
megabytes. Plain torch operations copy it into memory of its own, so a compiler joins them with what
makes the tensor, and a captured step keeps them. Nothing is changed on the way, and nothing is kept
for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from narrowcast.health.statistics.statistics import RUN

SAMPLE = 4096
"""Values of a sample: a share of one part in a thousand is seen, and what is rarer may not be."""


def sample(x: Tensor) -> Tensor:
    """Return SAMPLE values of a tensor, evenly spaced; of a smaller one, its values repeated.

    As a matrix of runs, which of a larger tensor is a view: a copy of it is one kernel.
    """
    flat = x.detach().reshape(-1)
    count, run, stride = spacing(flat.numel())
    if count < SAMPLE:
        return flat.repeat(-(-SAMPLE // max(count, 1)))[:SAMPLE].view(1, SAMPLE)
    return flat.view(-1, run)[: SAMPLE // run * stride : stride]


def spacing(count: int) -> tuple[int, int, int]:
    """Return, of so many values: their number, how many lie together, and every which are taken."""
    run = RUN if count % RUN == 0 else 1
    return count, run, max(count // SAMPLE, 1)


def take(x: Tensor, into: Tensor) -> None:
    """Copy a sample of `x`; of a tensor without values there is none."""
    if torch.compiler.is_compiling():
        _copy_sample(x, into)
        return
    # Else the function mode of an emulated region would look at each of these calls.
    with torch._C.DisableTorchFunction():
        _copy_sample(x, into)


def _copy_sample(x: Tensor, into: Tensor) -> None:
    if x.numel():
        # As `.data`: a module that is called twice has promised this memory to two backward passes.
        values = sample(x)
        into.data.view(values.shape).copy_(values)


def tap(x: Tensor, gradient_into: Tensor) -> Tensor:
    """Return `x`; copy a sample of its gradient in the backward pass.

    Eager code may go on to change `x` in place, so it gets `x` itself and a hook on it. A compiler
    traces no such hook, and knows by itself what is changed in place.
    """
    if not torch.compiler.is_compiling():
        x.register_hook(lambda gradient: take(gradient, gradient_into))
        return x
    # As no view, which nobody may change in place.
    result: Tensor = torch.ops.aten._unsafe_view(_tap(x, gradient_into), x.shape)
    return result


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient_into: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_into)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (into,) = ctx.saved_tensors
        take(gradient, into)
        return gradient, None


_tap: Any = _Tap.apply
