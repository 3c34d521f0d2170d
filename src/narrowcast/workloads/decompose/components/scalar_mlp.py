"""An MLP for each component by itself, from its activation to one number, with one hidden layer.

In plain torch the hidden layer is (seeds, rows, components, units), the largest tensor of a
decomposition by far; with kernels it is never in memory, forward or back. Inside `torch.compile`
these are the operators `narrowcast::scalar_mlp` and `narrowcast::scalar_mlp_back`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.workloads.decompose.components.fused import FORMATS, has_kernels


def scalar_mlp(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Return b2 + Σ_j w2_j gelu(w1_j h + b1_j), with the exact GELU, in the format of `h`.

    `h` is (seeds, rows, components), the hidden units' weights are (seeds, components, units), and
    `b2` is (seeds, components).
    """
    known = all(each.dtype in FORMATS for each in (h, w1, b1, w2, b2))
    if known and h.shape[1] > 0 and has_kernels(h.device.type):
        result: Tensor = _apply(h, w1, b1, w2, b2)
        return result
    with torch.autocast(h.device.type, enabled=False):
        return _plain(h, w1, b1, w2, b2)


def _plain(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Compute with rows along the last dimension: half the time of sums along the units."""
    seeds, rows, count = h.shape
    w1, b1, w2 = (each.flatten(0, 1) for each in (w1, b1, w2))  # (seeds · components, units)
    lines = h.mT.reshape(seeds * count, 1, rows).to(torch.promote_types(h.dtype, w1.dtype))
    hidden = F.gelu(torch.baddbmm(b1.unsqueeze(2), w1.unsqueeze(2), lines))
    out = torch.baddbmm(b2.reshape(-1, 1, 1), w2.unsqueeze(1), hidden)
    return out.reshape(seeds, count, rows).mT.to(h.dtype)


class _ScalarMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h, weights = h.contiguous(), torch.stack([w1.mT, b1.mT, w2.mT]).float()
        ctx.save_for_backward(h, weights)
        ctx.formats = w1.dtype, b1.dtype, w2.dtype, b2.dtype
        result: Tensor = torch.ops.narrowcast.scalar_mlp(h, weights, b2.float().contiguous())
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        to_h, sums = torch.ops.narrowcast.scalar_mlp_back(grad.contiguous(), h, weights, needs[0])
        _, seeds, units, count = weights.shape
        *hidden, last = sums.split([seeds * count * units] * 3 + [seeds * count])
        own = [each.view(seeds, count, units) for each in hidden]
        both = zip((*own, last.view(seeds, count)), ctx.formats, strict=True)
        return to_h if needs[0] else None, *[each.to(dtype) for each, dtype in both]


_apply: Any = _ScalarMlp.apply


def _forward(h: Tensor, weights: Tensor, last: Tensor) -> Tensor:
    from narrowcast.workloads.decompose.components.kernels import mlp  # Triton is not everywhere

    return mlp.mlp_forward(h, weights, last)


def _backward(grad: Tensor, h: Tensor, weights: Tensor, to_h: bool) -> tuple[Tensor, Tensor]:
    from narrowcast.workloads.decompose.components.kernels import mlp

    return mlp.mlp_backward(grad, h, weights, to_h=to_h)


def _shape(h: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(h)


def _shapes(_: Tensor, h: Tensor, weights: Tensor, to_h: bool) -> tuple[Tensor, Tensor]:
    sums = weights.new_empty(weights.numel() + h.shape[0] * h.shape[2])
    return torch.empty_like(h) if to_h else h.new_empty(0), sums


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "scalar_mlp(Tensor h, Tensor weights, Tensor last) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
_library.define(
    "scalar_mlp_back(Tensor grad, Tensor h, Tensor weights, bool to_h) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("scalar_mlp", _forward, "CompositeExplicitAutograd")
_library.impl("scalar_mlp_back", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::scalar_mlp", _shape)
torch.library.register_fake("narrowcast::scalar_mlp_back", _shapes)
