"""Linear layers whose products run on fp8 tensor cores, with one scale a row.

A scale belongs to a row along the dimension that is summed, so each product needs operands of its
own: an outlier spoils its row and no other, and in exchange every operand is read once more. A
batch whose rows are not a multiple of 16 is padded with zeros, which add nothing to any product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.fp8 import MULTIPLE
from narrowcast.numerics import BF16, BlockFormat, Format, cast, scale_for
from narrowcast.precision.operands import Along, ProductFormats, is_narrow


class Fp8RowLinear(nn.Linear):
    """A linear layer with native fp8 products scaled by rows, forward and backward."""

    nc_formats: ProductFormats

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats; returns the output format's dtype."""
        result: Tensor = _fp8_product(input, self.weight, self.bias, self.nc_formats)
        return result

    def extra_repr(self) -> str:
        """Say the formats where the model is printed."""
        f = self.nc_formats
        return (
            f"{super().extra_repr()}, forward={f.forward.name}, grad_input={f.grad_input.name}, "
            f"grad_weight={f.grad_weight.name}, scaling=row, native"
        )


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        formats: ProductFormats,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (rows, in)
        padded = _padded(rows)
        x_scale = scale_for(padded, _plain(formats.forward), per="row")
        weight_scale = scale_for(weight, _plain(formats.forward), per="row")
        x_narrow = _narrow(padded, formats.forward, x_scale)
        weight_narrow = _narrow(weight, formats.forward, weight_scale)
        output = _product(
            x_narrow,
            x_scale,
            weight_narrow.t(),
            weight_scale.t(),
            dtype=formats.output.dtype,
            fast=formats.fast,
        )
        output = output[: rows.shape[0]]
        if bias is not None:
            output = output + bias.to(output.dtype)
        # Scales run the other way in a backward product.
        ctx.save_for_backward(padded, weight)
        ctx.formats, ctx.has_bias = formats, bias is not None
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        formats: ProductFormats = ctx.formats
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        rows, grad = grad.shape[0], _padded(grad)
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            narrow, scale = _gradient(grad, formats.grad_input, "row")
            right, right_scale = _beside(weight, formats, formats.grad_input)
            grad_x = _product(
                narrow, scale, _columns(right), right_scale, dtype=formats.output.dtype
            )
            grad_x = grad_x[:rows].view(ctx.x_shape).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            narrow, scale = _gradient(grad, formats.grad_weight, "column")
            right, right_scale = _beside(x, formats, formats.grad_weight)
            grad_weight = _product(
                narrow.t().contiguous(),
                scale.t(),
                _columns(right),
                right_scale,
                dtype=formats.output.dtype,
            )
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(formats.output.dtype)
        return grad_x, grad_weight, grad_bias, None


_fp8_product: Any = _Fp8Product.apply


def _gradient(grad: Tensor, target: Format | BlockFormat, along: Along) -> tuple[Tensor, Tensor]:
    if not is_narrow(target.name):
        return grad.to(BF16.dtype), torch.ones((1, 1), device=grad.device)
    scale = scale_for(grad, _plain(target), per=along)
    return _narrow(grad, target, scale), scale


def _beside(
    other: Tensor, formats: ProductFormats, product: Format | BlockFormat
) -> tuple[Tensor, Tensor]:
    """Return the operand beside the gradient, and its scale."""
    if not is_narrow(product.name):
        return other.to(BF16.dtype), torch.ones((1, 1), device=other.device)
    scale = scale_for(other, _plain(formats.forward), per="column")
    return _narrow(other, formats.forward, scale), scale


def _plain(target: Format | BlockFormat) -> Format:
    assert isinstance(target, Format)
    return target


def _narrow(x: Tensor, target: Format | BlockFormat, scale: Tensor) -> Tensor:
    """Scale and cast. What is not finite becomes NaN rather than the largest value."""
    target = _plain(target)
    scaled = x.float() * scale
    return cast(scaled.clamp(-target.largest, target.largest) + scaled * 0, target, saturate=False)


def _product(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    *,
    dtype: torch.dtype | None,
    fast: bool = False,
) -> Tensor:
    if left.dtype in (torch.bfloat16, torch.float16):
        return left @ right
    if not left.numel():  # of a batch without rows, which has no scales
        return left.new_zeros((left.shape[0], right.shape[1]), dtype=dtype)
    return torch._scaled_mm(
        left,
        right,
        # The product divides by what the operands were multiplied with.
        scale_a=left_scale.float().reciprocal().contiguous(),
        scale_b=right_scale.float().reciprocal().contiguous(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _columns(x: Tensor) -> Tensor:
    """Lay a matrix out column by column, as the right operand must be."""
    return x.t().contiguous().t()


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
