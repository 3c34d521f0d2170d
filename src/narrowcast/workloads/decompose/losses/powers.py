"""Means of importances to a power, with a gradient of their own.

By autograd a site takes a dozen launches for it, each over all rows; so it is a kernel each way
where there are kernels, and in plain torch as few operations as there can be.

An importance of exactly 0 has no slope under a power below 1. By the formula it would have
p · epsilon^(p − 1), 6e6 at p = 0.4, and one such number presses harder than all others together. In
exact arithmetic nothing is ever exactly 0; products in bf16 on a GPU come to it often enough that,
below p = 0.7, all importances of a language model were pressed to nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.fused import FORMATS, has_kernels
from narrowcast.workloads.decompose.losses.divergence import wide
from narrowcast.workloads.decompose.terms import EPSILON


def power_means(
    uppers: Sequence[Tensor], power: float | Tensor, epsilon: float = EPSILON
) -> Tensor:
    """Return the means over rows of importances, plus epsilon, to a power, which is a constant.

    `uppers` are (seeds, rows, components), and the result (seeds, components of all sites), in
    fp32 or wider. What is below 0 counts as 0: swish_hard dips there, where no power but a whole
    one is a number.
    """
    result: Tensor = _apply(power, epsilon, *uppers)
    return result


class _PowerMeans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, power: float | Tensor, epsilon: float, *uppers: Tensor) -> Tensor:
        ctx.power, ctx.epsilon = power, epsilon
        if _has_kernel(uppers):
            from narrowcast.workloads.decompose.components.kernels import powers

            uppers = tuple(each.contiguous() for each in uppers)
            ctx.save_for_backward(*uppers)
            return powers.power_means(uppers, power, epsilon)
        ctx.save_for_backward(*uppers)
        return torch.cat([_raised(each, power, epsilon).mean(1) for each in uppers], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        uppers, power, epsilon = ctx.saved_tensors, ctx.power, ctx.epsilon
        if _has_kernel(uppers):
            from narrowcast.workloads.decompose.components.kernels import powers

            return None, None, *powers.power_means_back(grad, uppers, power, epsilon)
        lines = (grad / uppers[0].shape[1]).split([each.shape[-1] for each in uppers], -1)
        both = zip(uppers, lines, strict=True)
        return (
            None,
            None,
            *[
                _slope(each, power, epsilon, line.unsqueeze(1)).to(each.dtype)
                for each, line in both
            ],
        )


_apply: Any = _PowerMeans.apply


def _raised(upper: Tensor, power: float | Tensor, epsilon: float) -> Tensor:
    x = wide(upper).clamp(min=0).add_(epsilon)
    return x if isinstance(power, float) and power == 1 else x.pow_(power)


def _slope(upper: Tensor, power: float | Tensor, epsilon: float, inputs: Tensor) -> Tensor:
    """Return the gradient of an importance, where `given` is that of its power."""
    if isinstance(power, float) and power == 1:
        return torch.where(upper < 0, 0.0, inputs)
    slope = _raised(upper, power - 1, epsilon).mul_(inputs * power)
    return slope.masked_fill_(_without_slope(upper, power), 0.0)


def _without_slope(upper: Tensor, power: float | Tensor) -> Tensor:
    if isinstance(power, Tensor):
        return torch.where(power < 1, upper <= 0, upper < 0)
    return upper <= 0 if power < 1 else upper < 0


def _has_kernel(uppers: Sequence[Tensor]) -> bool:
    # What is compiled fuses the arithmetic by itself.
    if torch.compiler.is_compiling() or any(each.dtype not in FORMATS for each in uppers):
        return False
    return uppers[0].numel() > 0 and has_kernels(uppers[0].device.type)
