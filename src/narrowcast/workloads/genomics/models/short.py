"""A short convolution of each channel, which turns (length, channels) into (channels, length).

Torch's own needs a copy that is padded and turned, and another layout again for its gradients; on a
GPU a kernel does both at once. Inside `torch.compile` it is `narrowcast::short_convolution`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import unsupported_reason


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor, *, causal: bool) -> Tensor:
    """Return (rows, channels, length) of (rows, length, channels), by (channels, 3) taps.

    The last tap is the position's own if `causal`, else the middle one.
    """
    left = 2 if causal else 1
    if x.device.type == "cpu" or x.dtype == torch.float64:
        padded = F.pad(x.transpose(1, 2), (left, 2 - left))
        return F.conv1d(padded, weight[:, None], bias, groups=len(bias))
    result: Tensor = _apply(x, weight, bias, left)
    return result


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, left: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.left = left
        result: Tensor = torch.ops.narrowcast.short_convolution(x, weight, bias, left)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.narrowcast.short_convolution_backward(grad, *ctx.saved_tensors, ctx.left)
        return *grads, None


_apply: Any = _ShortConvolution.apply


def _forward(x: Tensor, weight: Tensor, bias: Tensor, left: int) -> Tensor:
    if unsupported_reason(x.device):
        padded = F.pad(x.transpose(1, 2), (left, 2 - left))
        taps = weight[:, None].to(x.dtype)
        return F.conv1d(padded, taps, bias.to(x.dtype), groups=len(bias)).contiguous()
    from narrowcast.workloads.genomics.models.kernels.short import short_forward

    return short_forward(x, weight, bias, left)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    if unsupported_reason(x.device):
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
            out = _forward(inputs[0], inputs[1], inputs[2], left)
        to_x, to_weight, to_bias = torch.autograd.grad(out, inputs, grad)
        return to_x.contiguous(), to_weight.contiguous(), to_bias.contiguous()
    from narrowcast.workloads.genomics.models.kernels.short import short_backward

    to_x, to_weight, to_bias = short_backward(grad, x, weight, left)
    return to_x, to_weight.contiguous(), to_bias.contiguous()


def _empty(x: Tensor, weight: Tensor, bias: Tensor, left: int) -> Tensor:
    rows, length, channels = x.shape
    return x.new_empty((rows, channels, length))


def _empty_grads(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "short_convolution(Tensor x, Tensor weight, Tensor bias, int left) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "short_convolution_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, int left)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("short_convolution", _forward, "CompositeExplicitAutograd")
_library.impl("short_convolution_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::short_convolution", _empty)
torch.library.register_fake("narrowcast::short_convolution_backward", _empty_grads)
