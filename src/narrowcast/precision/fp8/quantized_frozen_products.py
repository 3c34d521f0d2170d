"""Products of quantized frozen weights: on fp8 tensor cores, or emulated.

In the backward pass outputs are summed over, so their scales are multiplied onto the gradient
before it is cast. They are powers of two, so this is exact.
"""

from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.fp8_groups import quantize_groups, transposed_bytes
from narrowcast.precision.fp8.scaling import scaled_product, torch_dtype
from narrowcast.precision.products.autocast import autocast_off
from narrowcast.precision.products.emulated import linear_product
from narrowcast.precision.products.operands import (
    ProductFormats,
    is_transformed,
    needs_scale,
    operand,
    rounded,
    unseen,
)
from narrowcast.precision.quantized_frozen import QuantizedFrozenInfo, widened
from narrowcast.precision.swap import Mixin


class QuantizedFrozenProducts(Mixin):
    """A layer with a kept weight and products in formats of their own."""

    nc_formats: ProductFormats
    nc_native: bool = False
    """Whether the device multiplies, and nothing is emulated."""
    nc_autocast: str | None = None
    """The device type whose autocast is on around this layer, if one is: off, it is an output."""

    weight_e4m3: Tensor
    weight_scale: Tensor
    quantized: QuantizedFrozenInfo
    bias: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply in this layer's formats."""
        return self.nc_product(*args, **kwargs)

    def nc_product(self, x: Tensor) -> Tensor:
        """Return input · weightᵀ + bias in this layer's formats."""
        if self.nc_autocast is not None and not torch.is_autocast_enabled(self.nc_autocast):
            output: Tensor = super().forward(x)
            return output
        codes, scale, formats = self.weight_e4m3, self.weight_scale, self.nc_formats
        if is_transformed() or x.dtype == torch.float64:
            wide = widened(codes, scale, torch.promote_types(x.dtype, torch.float32))
            return linear_product(x, wide, self.bias, formats=formats)
        result: Tensor = _apply(x, self.bias, codes, scale, formats, self.nc_native, False)
        # Where no autocast is around, nothing will bring the next layer's operands to one dtype.
        return result if self.nc_autocast is not None else result.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the formats for `print(model)`."""
        how = "native" if self.nc_native else "emulated"
        return f"{super().extra_repr()}, {self.nc_formats}, {how}"


class _QuantizedFrozenProduct(torch.autograd.Function):
    """x · Wᵀ of a kept weight, or gradient · W (`across`); each is the derivative of the other."""

    @staticmethod
    @unseen
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scale: Tensor,
        formats: ProductFormats,
        native: bool,
        across: bool,
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.formats, ctx.native, ctx.across = formats, native, across
        ctx.bias_dtype, ctx.x_dtype = None if bias is None else bias.dtype, x.dtype
        rows = x.reshape(-1, x.shape[-1])
        with autocast_off(x.device.type):
            by = _across if across else _along
            output = by(rows, bias, codes, scale, formats, native)
        return output.view(*x.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            stored = ctx.saved_tensors
            grad_x = _apply(grad, None, *stored, ctx.formats, ctx.native, not ctx.across)
            grad_x = grad_x.to(ctx.x_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            total = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)
            grad_bias = rounded(total, ctx.formats.output).to(ctx.bias_dtype)
        return grad_x, grad_bias, *[None] * 5


_apply: Any = _QuantizedFrozenProduct.apply


def _along(
    rows: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    formats: ProductFormats,
    native: bool,
) -> Tensor:
    """Return rows · Wᵀ + bias."""
    if not native:
        wide = widened(codes, scale, torch.float32)
        return linear_product(rows, wide, bias, formats=formats)
    matched = quantize_groups(rows, torch_dtype(formats.forward), "row", columnwise=False)
    output = scaled_product(
        matched.rowwise,
        codes,
        (matched.rowwise_scale_inv, scale),
        "row",
        dtype=torch_dtype(formats.output),
        fast=formats.fast,
        bias=bias,
    )
    return output[: rows.shape[0]]


def _across(
    grad: Tensor,
    _: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    formats: ProductFormats,
    native: bool,
) -> Tensor:
    """Return gradient · W."""
    target, output = formats.grad_input, formats.output
    narrow = needs_scale(target.name)
    if native and narrow:
        result = quantize_groups(grad, torch_dtype(target), "row", columnwise=False, factors=scale)
        ones = torch.ones(codes.shape[1], dtype=torch.float32, device=codes.device)
        scales = (result.rowwise_scale_inv, ones)
        across = transposed_bytes(codes)
        product = scaled_product(result.rowwise, across, scales, "row", dtype=torch_dtype(output))
        return product[: grad.shape[0]]
    if native:
        wide = torch_dtype(target)
        return (grad.to(wide) @ widened(codes, scale, wide)).to(torch_dtype(output))
    value = rounded(grad.float(), output)
    if narrow:
        left = operand(value * scale, target, "row", "row", None)
        extra = codes.float()
    else:
        left = rounded(value, target)  # type: ignore[arg-type]  # has no scale, so no blocks
        extra = rounded(widened(codes, scale, torch.float32), target)  # type: ignore[arg-type]
    return rounded(torch.ops.aten.mm.default(left, extra), output)
