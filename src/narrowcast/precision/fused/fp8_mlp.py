"""Two fp8 linear layers and the GELU between them, which is never written in 16 bits."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.fp8 import quantize
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fp8.scaling import scaled_product, torch_dtype
from narrowcast.precision.products.operands import ProductFormats, needs_scale
from narrowcast.precision.swap import Mixin, fused_mlp_layers, is_watched


class Fp8Mlp(Mixin):
    """A module of two linear layers and a GELU, run as one."""

    nc_layers: tuple[str, str]
    """The names of its two linear layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return down(gelu(up(x))) in the formats of the two layers."""
        first, last = (getattr(self, name) for name in self.nc_layers)
        if is_watched(first, last):
            plain: Tensor = super().forward(x)  # a hook needs the tensor between them
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
            *layouts_and_scale(first),
            *layouts_and_scale(last),
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
    """Return whether a module declares a chain whose two layers can be joined."""
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
        and formats.scaling not in ("row", "block")
        and formats.grad_input == formats.grad_weight
        and needs_scale(formats.grad_input.name)
    )


def layouts_and_scale(layer: Fp8Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's fp8 weight, its transpose, and the inverse of its scale."""
    made = layer.nc_weight
    assert made is not None, "the weight was never quantised; call the model inside autocast()"
    return made.rowwise, made.columnwise, made.scale_inv


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        last: Tensor,
        first_rowwise: Tensor,
        first_columnwise: Tensor,
        first_scale_inv: Tensor,
        last_rowwise: Tensor,
        last_columnwise: Tensor,
        last_scale_inv: Tensor,
        x_scale_inv: Tensor | None,
        x_cast_stats: Tensor | None,
        between_scale_inv: Tensor | None,
        between_cast_stats: Tensor | None,
        back_scale_inv: Tensor | None,
        back_cast_stats: Tensor | None,
        between_back_scale_inv: Tensor | None,
        between_back_cast_stats: Tensor | None,
        formats: ProductFormats,
    ) -> Tensor:
        target, output = torch_dtype(formats.forward), torch_dtype(formats.output)
        into = quantize(x, target, scale_inv=x_scale_inv, cast_stats=x_cast_stats)
        wide = scaled_product(
            into.rowwise,
            first_rowwise,
            (into.scale_inv, first_scale_inv),
            dtype=output,
            fast=formats.fast,
        )
        between = quantize(
            wide,
            target,
            scale_inv=between_scale_inv,
            cast_stats=between_cast_stats,
            activation="gelu",
        )
        result = scaled_product(
            between.rowwise,
            last_rowwise,
            (between.scale_inv, last_scale_inv),
            dtype=output,
            fast=formats.fast,
        )
        ctx.save_for_backward(
            into.columnwise, into.scale_inv, wide, between.columnwise, between.scale_inv,
            first_columnwise, first_scale_inv, last_columnwise, last_scale_inv,
            back_scale_inv, back_cast_stats, between_back_scale_inv, between_back_cast_stats,
        )  # fmt: skip
        ctx.formats, ctx.rows, ctx.x_dtype = formats, x.shape[0], x.dtype
        ctx.dtypes = first.dtype, last.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            x, x_scale_inv, wide, between, between_scale_inv,
            first, first_scale_inv, last, last_scale_inv,
            scale_inv, cast_stats, wide_scale_inv, wide_cast_stats,
        ) = ctx.saved_tensors  # fmt: skip
        target, output = torch_dtype(ctx.formats.grad_input), torch_dtype(ctx.formats.output)
        grad_x = grad_first = grad_last = None
        needs_x, needs_first, needs_last = ctx.needs_input_grad[:3]
        matched = quantize(
            grad, target, scale_inv=scale_inv, cast_stats=cast_stats, columnwise=needs_last
        )
        if needs_x or needs_first:
            widened = scaled_product(
                matched.rowwise, last, (matched.scale_inv, last_scale_inv), dtype=output
            )
            through = quantize(
                widened,
                target,
                scale_inv=wide_scale_inv,
                cast_stats=wide_cast_stats,
                rowwise=needs_x,
                columnwise=needs_first,
                activation="gelu_backward",
                second=wide,
            )
            if needs_x:
                grad_x = scaled_product(
                    through.rowwise, first, (through.scale_inv, first_scale_inv), dtype=output
                )
                grad_x = grad_x[: ctx.rows].to(ctx.x_dtype)
            if needs_first:
                scales = (through.scale_inv, x_scale_inv)
                grad_first = scaled_product(through.columnwise, x, scales, dtype=ctx.dtypes[0])
        if needs_last:
            scales = (matched.scale_inv, between_scale_inv)
            grad_last = scaled_product(matched.columnwise, between, scales, dtype=ctx.dtypes[1])
        return grad_x, grad_first, grad_last, *[None] * 15


_apply: Any = _Chain.apply
