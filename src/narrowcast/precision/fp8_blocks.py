"""Linear layers whose products run on fp8 tensor cores, with a scale for each block of 128.

Inputs and gradients have one scale for 128 values along the dimension that is summed, weights one
for 128 × 128. The scales are those of the values at hand, and are made in the one read that casts
them: as local as a scale for each row and more, at the price of products that add up blocks in
fp32. Kernels for it are in cuBLAS for compute capability 9.0.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.fp8_blocks import BlockQuantized, quantize_blocks
from narrowcast.numerics import BF16
from narrowcast.precision.fp8_linear import dtype_of
from narrowcast.precision.operands import ProductFormats, is_narrow


class Fp8BlockLinear(nn.Linear):
    """A linear layer with native fp8 products scaled by blocks, forward and backward."""

    nc_formats: ProductFormats
    nc_weight: BlockQuantized | None = None
    """The weight in fp8."""
    nc_weight_is_of: tuple[int, int] | None = None
    """Which weight, and which version of it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats; returns the output format's dtype."""
        if not torch.compiler.is_compiling():
            self.nc_refresh()
        made = self.nc_weight
        assert made is not None, "the weight was never quantised; call the model inside compute()"
        rows = input.reshape(-1, input.shape[-1])
        output: Tensor = _apply(rows, self.weight, self.bias, *made, self.nc_formats)
        return output.view(*input.shape[:-1], self.out_features)

    def nc_refresh(self) -> None:
        """Make the weight in fp8 anew if it has changed."""
        now = (self.weight.data_ptr(), self.weight._version)
        if now == self.nc_weight_is_of:
            return
        with torch.inference_mode(mode=False), torch.no_grad():  # kept for training too
            self._nc_make()
        self.nc_weight_is_of = now

    def _nc_make(self) -> None:
        fresh = quantize_blocks(
            self.weight.detach(),
            dtype_of(self.nc_formats.forward),
            square=True,
            columns=is_narrow(self.nc_formats.grad_input.name),
        )
        if self.nc_weight is None:
            self.nc_weight = fresh
        else:  # in the same memory: a captured step reads from there
            for kept, new in zip(self.nc_weight, fresh, strict=True):
                kept.copy_(new)

    def extra_repr(self) -> str:
        """Say the formats where the model is printed."""
        f = self.nc_formats
        return (
            f"{super().extra_repr()}, forward={f.forward.name}, grad_input={f.grad_input.name}, "
            f"grad_weight={f.grad_weight.name}, scaling=block, native"
        )


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rows: Tensor,
        weight_columns: Tensor,
        rows_inverse: Tensor,
        columns_inverse: Tensor,
        formats: ProductFormats,
    ) -> Tensor:
        narrow_x = is_narrow(formats.grad_weight.name)
        found = quantize_blocks(x, dtype_of(formats.forward), columns=narrow_x)
        output = _product(found.rows, weight_rows, found.rows_inverse, rows_inverse, square=True)[
            : x.shape[0]
        ]
        if bias is not None:
            output = output + bias.to(output.dtype)
        narrow_weight = is_narrow(formats.grad_input.name)
        ctx.save_for_backward(
            found.columns if narrow_x else x,
            found.columns_inverse,
            weight_columns if narrow_weight else weight,
            columns_inverse,
        )
        ctx.formats, ctx.bias_dtype = formats, None if bias is None else bias.dtype
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        formats: ProductFormats = ctx.formats
        x, x_inverse, weight, weight_inverse = ctx.saved_tensors
        to_input, to_weight = formats.grad_input, formats.grad_weight
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = grad_bias = None
        if needs_x and is_narrow(to_input.name):
            found = quantize_blocks(grad, dtype_of(to_input), columns=False)
            grad_x = _product(found.rows, weight, found.rows_inverse, weight_inverse, square=True)
        elif needs_x:
            grad_x = grad.to(BF16.dtype) @ weight.to(BF16.dtype)
        if needs_weight and is_narrow(to_weight.name):
            found = quantize_blocks(grad, dtype_of(to_weight), rows=False)
            grad_weight = _product(found.columns, x, found.columns_inverse, x_inverse, square=False)
        elif needs_weight:
            grad_weight = grad.to(BF16.dtype).t() @ x.to(BF16.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (
            None if grad_x is None else grad_x[: grad.shape[0]].to(ctx.x_dtype),
            None if grad_weight is None else grad_weight.to(ctx.weight_dtype),
            grad_bias,
            *[None] * 5,
        )


_apply: Any = _Fp8Product.apply


def _product(
    left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, *, square: bool
) -> Tensor:
    """Return left · rightᵀ in bf16; `square`: the right operand has blocks of 128 × 128."""
    from torch.nn.functional import ScalingType, scaled_mm

    by_line, by_square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    result: Tensor = scaled_mm(
        left,
        right.t(),
        left_inverse.t(),
        by_line,
        right_inverse.t(),
        by_square if square else by_line,
        output_dtype=torch.bfloat16,
    )
    return result
