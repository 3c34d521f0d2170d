"""Layer norm in one read and one write, which keeps only its 16-bit input."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import is_traced
from narrowcast.kernels.norms.programs import backward_normed, write_normed


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return `F.layer_norm` over the dimensions of `weight`, in `dtype`, computed in fp32."""
    result: Tensor = _apply(x, weight, bias, eps, dtype)
    return result


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        call = torch.ops.narrowcast.layer_norm if is_traced(x, weight) else _layer_norm
        result: Tensor = call(x, weight, bias, eps, dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        call = torch.ops.narrowcast.layer_norm_back if is_traced(grad, x) else _layer_norm_back
        grad_x, by_weight, by_bias = call(grad, x, weight, ctx.eps, needs_weight, needs_bias)
        by_weight, by_bias = (by_weight if needs_weight else None, by_bias if needs_bias else None)
        return grad_x, by_weight, by_bias, None, None


_apply: Any = _LayerNorm.apply


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    result: Tensor = _normed_shape(x, weight, bias, eps, dtype)
    write_normed(x, weight, bias, result, eps=eps, centred=True)
    return result


def _layer_norm_back(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, sums = backward_normed(
        grad, x, weight, eps=eps, centred=True, needs_weight=needs_weight, needs_bias=needs_bias
    )
    by_weight = sums[0] if needs_weight else weight.new_empty(0)
    return grad_x, by_weight, sums[-1] if needs_bias else weight.new_empty(0)


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "layer_norm_back(Tensor grad, Tensor x, Tensor weight, float eps, bool needs_weight,"
    " bool needs_bias) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("layer_norm", _layer_norm, "CompositeExplicitAutograd")
_library.impl("layer_norm_back", _layer_norm_back, "CompositeExplicitAutograd")


@torch.library.register_fake("narrowcast::layer_norm")
def _normed_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.register_fake("narrowcast::layer_norm_back")
def _back_shapes(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    empty = weight.new_empty(0)
    by_weight = torch.empty_like(weight) if needs_weight else empty
    return grad_x, by_weight, torch.empty_like(weight) if needs_bias else empty
