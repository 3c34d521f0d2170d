"""RMS norm in one read and one write, which keeps only its 16-bit input."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import is_traced
from narrowcast.kernels.norms.programs import backward_normed, write_normed


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, offset: float, rounds: bool, dtype: torch.dtype
) -> Tensor:
    """Return x / rms(x) · (weight + offset), in `dtype`, computed in fp32.

    With `rounds` the quotient is rounded to the dtype of `x` first, as some models do.
    """
    result: Tensor = _apply(x, weight, eps, offset, rounds, dtype)
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        rounds: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = eps, offset, rounds
        call = torch.ops.narrowcast.rms_norm if is_traced(x, weight) else _rms_norm
        result: Tensor = call(x, weight, eps, offset, rounds, dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[1]
        call = torch.ops.narrowcast.rms_norm_back if is_traced(grad, x) else _rms_norm_back
        eps, offset, rounds = ctx.settings
        grad_x, grad_weight = call(grad, x, weight, eps, offset, rounds, needs)
        return grad_x, grad_weight if needs else None, None, None, None, None


_apply: Any = _RmsNorm.apply


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounds: bool, dtype: torch.dtype
) -> Tensor:
    result: Tensor = _normed_shape(x, weight, eps, offset, rounds, dtype)
    write_normed(x, weight, None, result, eps=eps, offset=offset, rounds=rounds)
    return result


def _rms_norm_back(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    rounds: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_x, sums = backward_normed(
        grad, x, weight, eps=eps, offset=offset, rounds=rounds, needs_weight=needs_weight
    )
    return grad_x, sums[0] if needs_weight else weight.new_empty(0)


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, bool rounds, ScalarType dtype)"
    " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "rms_norm_back(Tensor grad, Tensor x, Tensor weight, float eps, float offset, bool rounds,"
    " bool needs_weight) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
_library.impl("rms_norm_back", _rms_norm_back, "CompositeExplicitAutograd")


@torch.library.register_fake("narrowcast::rms_norm")
def _normed_shape(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounds: bool, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.register_fake("narrowcast::rms_norm_back")
def _back_shapes(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    rounds: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, torch.empty_like(weight) if needs_weight else weight.new_empty(0)
