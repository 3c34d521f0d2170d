"""Two fp8 linear layers and the GELU between them, which is never written in 16 bits.

The activation and its derivative are computed where the matrix is read to be quantised, in both
directions: of the four passes over the widest tensors of a transformer, two disappear.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.fp8 import quantize
from narrowcast.precision.fp8.tensorwise import Fp8Linear, dtype_of, product
from narrowcast.precision.fused.declared import fused_mlp_layers, is_watched
from narrowcast.precision.products.operands import ProductFormats, is_narrow


class Fp8Mlp(nn.Module):
    """A module of two linear layers and a GELU, run as one."""

    nc_layers: tuple[str, str]
    """The names of its two linear layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return down(gelu(up(x))) in the formats of the two layers."""
        first, last = (getattr(self, name) for name in self.nc_layers)
        if is_watched(first, last):
            plain: Tensor = super().forward(x)  # somebody wants to see what is between them
            return plain
        if not torch.compiler.is_compiling():
            first.nc_refresh()
            last.nc_refresh()
        rows = x.reshape(-1, x.shape[-1])
        (x_scale, between_back), (between, back) = first.nc_scales(), last.nc_scales()
        output: Tensor = _apply(
            rows,
            first.weight,
            last.weight,
            *first.nc_weight,
            *last.nc_weight,
            *x_scale,
            *between,
            *back,
            *between_back,
            first.nc_formats,
        )
        output = output[: rows.shape[0]]
        if last.bias is not None:
            output = output + last.bias.to(output.dtype)
        return output.view(*x.shape[:-1], last.out_features)


def can_fuse(module: nn.Module) -> bool:
    """Say whether a module promises a chain whose two layers have products that can be joined."""
    ends = fused_mlp_layers(module)
    if ends is None:
        return False
    first, last = (getattr(module, name, None) for name in ends)
    if not (isinstance(first, Fp8Linear) and isinstance(last, Fp8Linear)):
        return False
    formats, bias = first.nc_formats, cast("Tensor | None", first.bias)
    return (
        bias is None  # its gradient is the sum of what is never written
        and formats == last.nc_formats
        and formats.grad_input == formats.grad_weight
        and is_narrow(formats.grad_input.name)
    )


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        last: Tensor,
        first_rows: Tensor,
        first_columns: Tensor,
        first_inverse: Tensor,
        last_rows: Tensor,
        last_columns: Tensor,
        last_inverse: Tensor,
        x_inverse: Tensor | None,
        x_notes: Tensor | None,
        between_inverse: Tensor | None,
        between_notes: Tensor | None,
        back_inverse: Tensor | None,
        back_notes: Tensor | None,
        between_back_inverse: Tensor | None,
        between_back_notes: Tensor | None,
        formats: ProductFormats,
    ) -> Tensor:
        target, output = dtype_of(formats.forward), dtype_of(formats.output)
        into = quantize(x, target, inverse=x_inverse, notes=x_notes)
        wide = product(
            into.rows, first_rows, (into.inverse, first_inverse), dtype=output, fast=formats.fast
        )
        between = quantize(
            wide, target, inverse=between_inverse, notes=between_notes, activation="gelu"
        )
        result = product(
            between.rows,
            last_rows,
            (between.inverse, last_inverse),
            dtype=output,
            fast=formats.fast,
        )
        ctx.save_for_backward(
            into.columns, into.inverse, wide, between.columns, between.inverse,
            first_columns, first_inverse, last_columns, last_inverse,
            back_inverse, back_notes, between_back_inverse, between_back_notes,
        )  # fmt: skip
        ctx.formats, ctx.rows, ctx.x_dtype = formats, x.shape[0], x.dtype
        ctx.dtypes = first.dtype, last.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            x, x_inverse, wide, between, between_inverse,
            first, first_inverse, last, last_inverse,
            inverse, notes, wide_inverse, wide_notes,
        ) = ctx.saved_tensors  # fmt: skip
        target, output = dtype_of(ctx.formats.grad_input), dtype_of(ctx.formats.output)
        grad_x = grad_first = grad_last = None
        needs_x, needs_first, needs_last = ctx.needs_input_grad[:3]
        found = quantize(grad, target, inverse=inverse, notes=notes, columns=needs_last)
        if needs_x or needs_first:
            widened = product(found.rows, last, (found.inverse, last_inverse), dtype=output)
            through = quantize(
                widened,
                target,
                inverse=wide_inverse,
                notes=wide_notes,
                rows=needs_x,
                columns=needs_first,
                activation="gelu_backward",
                beside=wide,
            )
            if needs_x:
                grad_x = product(
                    through.rows, first, (through.inverse, first_inverse), dtype=output
                )
                grad_x = grad_x[: ctx.rows].to(ctx.x_dtype)
            if needs_first:
                scales = (through.inverse, x_inverse)
                grad_first = product(through.columns, x, scales, dtype=ctx.dtypes[0])
        if needs_last:
            scales = (found.inverse, between_inverse)
            grad_last = product(found.columns, between, scales, dtype=ctx.dtypes[1])
        return grad_x, grad_first, grad_last, *[None] * 15


_apply: Any = _Chain.apply
