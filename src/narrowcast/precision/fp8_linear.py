"""Linear layers whose products run on fp8 tensor cores.

Each operand is scaled by a power of two, cast, and laid out as the product wants it: the left one
row by row, the right one column by column. A batch whose rows are not a multiple of 16 is padded
with zeros, which add nothing to any product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.numerics import BF16, Format, cast, scale_for
from narrowcast.precision.operands import Along, AmaxHistory, ProductFormats, is_narrow

# cuBLAS asks it of every dimension, the summed one included.
_MULTIPLE = 16


class Fp8Linear(nn.Linear):
    """A linear layer with native fp8 products, forward and backward."""

    nc_formats: ProductFormats
    nc_history: AmaxHistory | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats; returns the output format's dtype."""
        formats, history = self.nc_formats, self.nc_history
        scales: tuple[Tensor, Tensor] | None = None
        if history is not None:
            # Here, not inside the product: only here is it known whether this is training.
            assert isinstance(formats.forward, Format)
            scales = (
                history.scale(input, formats.forward, "input").view(1, 1),
                history.scale(self.weight, formats.forward, "weight").view(1, 1),
            )
        result: Tensor = _fp8_product(input, self.weight, self.bias, formats, scales, history)
        return result

    def extra_repr(self) -> str:
        """Say the formats where the model is printed."""
        f = self.nc_formats
        return (
            f"{super().extra_repr()}, forward={f.forward.name}, grad_input={f.grad_input.name}, "
            f"grad_weight={f.grad_weight.name}, scaling={f.scaling}, native"
        )


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        formats: ProductFormats,
        scales: tuple[Tensor, Tensor] | None,
        history: AmaxHistory | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (rows, in)
        padded = _padded(rows)
        x_scale, weight_scale = scales or (
            _scale(padded, formats, formats.forward, "row"),
            _scale(weight, formats, formats.forward, "row"),
        )
        x_narrow = _narrow(padded, formats.forward, x_scale)
        weight_narrow = _narrow(weight, formats.forward, weight_scale)
        output = _product(x_narrow, x_scale, weight_narrow.t(), weight_scale.t(), formats.output)
        output = output[: rows.shape[0]]
        if bias is not None:
            output = output + bias.to(output.dtype)
        if formats.one_rounding:
            ctx.save_for_backward(x_narrow, weight_narrow, x_scale, weight_scale)
        else:
            # Scales run the other way in a backward product, or it is wider.
            ctx.save_for_backward(padded, weight)
        ctx.formats, ctx.history, ctx.has_bias = formats, history, bias is not None
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        formats: ProductFormats = ctx.formats
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        rows, grad = grad.shape[0], _padded(grad)
        x, weight, x_scale, weight_scale = _saved(ctx)
        grad_x = grad_weight = grad_bias = None
        # One history serves both backward products: it is the same tensor.
        narrow, scale = _gradient(grad, formats, formats.grad_input, "row", ctx.history)
        if ctx.needs_input_grad[0]:
            right, right_scale = _beside(weight, weight_scale, formats, formats.grad_input)
            grad_x = _product(narrow, scale, _columns(right), right_scale, formats.output)
            grad_x = grad_x[:rows].view(ctx.x_shape).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if formats.scaling == "row" or formats.grad_weight != formats.grad_input:
                narrow, scale = _gradient(grad, formats, formats.grad_weight, "column", None)
            right, right_scale = _beside(x, x_scale, formats, formats.grad_weight)
            left = narrow.t().contiguous()
            grad_weight = _product(left, scale.t(), _columns(right), right_scale, formats.output)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(formats.output.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


_fp8_product: Any = _Fp8Product.apply


def _saved(ctx: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    if not ctx.formats.one_rounding:
        return (*ctx.saved_tensors, None, None)
    x, weight, x_scale, weight_scale = ctx.saved_tensors
    return x, weight, x_scale, weight_scale


def _gradient(
    grad: Tensor,
    formats: ProductFormats,
    target: Any,
    along: Along,
    history: AmaxHistory | None,
) -> tuple[Tensor, Tensor]:
    if not is_narrow(target.name):
        return grad.to(BF16.dtype), torch.ones((1, 1), device=grad.device)
    if history is None:
        scale = _scale(grad, formats, target, along)
    else:
        scale = history.scale(grad, target, "grad_output").view(1, 1)
    return _narrow(grad, target, scale), scale


def _beside(
    wide_or_narrow: Tensor, scale: Tensor | None, formats: ProductFormats, target: Any
) -> tuple[Tensor, Tensor]:
    """Return the operand beside the gradient, and its scale, for a product in `target`."""
    if scale is not None:
        return wide_or_narrow, scale
    if not is_narrow(target.name):
        return wide_or_narrow.to(BF16.dtype), torch.ones((1, 1), device=wide_or_narrow.device)
    scale = _scale(wide_or_narrow, formats, formats.forward, "column")
    return _narrow(wide_or_narrow, formats.forward, scale), scale


def _scale(x: Tensor, formats: ProductFormats, target: Any, along: Along) -> Tensor:
    """Return scales as a matrix that broadcasts against `x`: (1, 1), (rows, 1) or (1, columns)."""
    if formats.scaling == "row":
        return scale_for(x, target, per=along)
    return scale_for(x, target, per="tensor").view(1, 1)


def _narrow(x: Tensor, target: Any, scale: Tensor) -> Tensor:
    """Scale and cast. What is not finite becomes NaN rather than the largest value."""
    assert isinstance(target, Format)
    scaled = x.float() * scale
    return cast(scaled.clamp(-target.largest, target.largest) + scaled * 0, target, saturate=False)


def _product(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, output: Format
) -> Tensor:
    if left.dtype in (torch.bfloat16, torch.float16):
        return left @ right
    return torch._scaled_mm(
        left,
        right,
        # The product divides by what the operands were multiplied with.
        scale_a=left_scale.float().reciprocal().contiguous(),
        scale_b=right_scale.float().reciprocal().contiguous(),
        out_dtype=output.dtype,
        use_fast_accum=False,  # Hopper's fast sums keep 14 bits, and fp32 was asked for
    )


def _columns(x: Tensor) -> Tensor:
    """Lay a matrix out column by column, as the right operand must be."""
    return x.t().contiguous().t()


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % _MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
