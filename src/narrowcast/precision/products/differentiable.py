"""The products of a linear layer out of parts that can be differentiated again.

For second derivatives (`create_graph=True`) and `torch.func`. Values are those of
`emulated.linear_product`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.numerics import FP32, BlockFormat, Format
from narrowcast.precision.products.operands import (
    Along,
    ProductFormats,
    Scaled,
    is_delayed,
    straight,
    unseen,
)


class OperandScales(NamedTuple):
    """Scales from past steps, where there are any."""

    input: Tensor | None = None
    weight: Tensor | None = None
    grad_output: Tensor | None = None


def transformed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    formats: ProductFormats,
    scales: OperandScales,
) -> Tensor:
    """Return input · weightᵀ + bias where a transform of `torch.func` is at work."""
    apply: Any = _Transformed.apply
    result: Tensor = apply(x, weight, bias, formats, scales)
    return result


def gradients(
    grad: Tensor,  # (rows, out)
    x: Tensor,  # (rows, in), rounded already where each tensor is rounded once
    weight: Tensor,  # (out, in), likewise
    *,
    formats: ProductFormats,
    scales: OperandScales,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias that are needed."""
    grad = straight(grad, formats.output, torch.float32, formats.output)
    once = formats.one_rounding
    grad_x = grad_weight = grad_bias = None
    if needs[0]:
        extra = weight
        if not once:
            other = formats.other_operand(formats.grad_input)
            extra = _operand(weight, other, "column", formats, scales.weight, weight=True)
        left = _operand(grad, formats.grad_input, "row", formats, scales.grad_output)
        grad_x = _product(left, extra, formats)
    if needs[1]:
        extra = x
        if not once:
            other = formats.other_operand(formats.grad_weight)
            extra = _operand(x, other, "column", formats, scales.input)
        # The history is for the other product's format.
        past = scales.grad_output if formats.grad_weight == formats.grad_input else None
        left = _operand(grad, formats.grad_weight, "column", formats, past)
        grad_weight = _product(left.t(), extra, formats)
    if needs[2]:
        grad_bias = straight(grad.sum(0), formats.output, torch.float32, formats.output)
    return grad_x, grad_weight, grad_bias


def forward_weight(weight: Tensor, formats: ProductFormats, past: Tensor | None) -> Tensor:
    """Return a weight as the forward product has it."""
    return _operand(weight, formats.forward, "row", formats, past, weight=True)


def tied(value: Tensor, source: Tensor) -> Tensor:
    """Return a value whose gradient goes to another tensor: the one that it was made from."""
    apply: Any = _Tied.apply
    result: Tensor = apply(value, source)
    return result


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class _Transformed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @unseen
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        formats: ProductFormats,
        scales: OperandScales,
    ) -> Tensor:
        rows, matrix = _rounded_once(x, weight, formats, scales)
        output = rows @ matrix.t()
        if bias is not None:
            if formats.rounds_before_bias:
                output = straight(output, formats.output, torch.float32, formats.output)
            output = output + straight(bias, formats.output, torch.float32, formats.output)
        return _result(output, x, formats)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.formats, ctx.scales = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    @unseen
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        formats: ProductFormats = ctx.formats
        rows, matrix = x.reshape(-1, x.shape[-1]).float(), weight.float()
        if formats.one_rounding:
            rows, matrix = _rounded_once(x, weight, formats, ctx.scales)
        needs = (*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2])
        grad_x, grad_weight, grad_bias = gradients(
            grad.reshape(-1, grad.shape[-1]),
            rows,
            matrix,
            formats=formats,
            scales=ctx.scales,
            needs=needs,
        )
        if grad_x is not None:
            grad_x = grad_x.reshape(x.shape).to(x.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None

    @staticmethod
    @unseen
    def jvp(
        ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, bias_tangent: Tensor, *_: None
    ) -> Tensor:
        x, weight = ctx.saved_tensors
        formats: ProductFormats = ctx.formats
        rows, matrix = _rounded_once(x, weight, formats, ctx.scales)
        row_tangents, matrix_tangent = _rounded_once(
            x_tangent, weight_tangent, formats, OperandScales()
        )
        output = row_tangents @ matrix.t() + rows @ matrix_tangent.t()
        if bias_tangent is not None:
            output = output + bias_tangent.float()
        return _result(output, x, formats)


def _rounded_once(
    x: Tensor, weight: Tensor, formats: ProductFormats, scales: OperandScales
) -> tuple[Tensor, Tensor]:
    """Return the operands of the forward product."""
    rows = x.reshape(-1, x.shape[-1])
    return (
        _operand(rows, formats.forward, "row", formats, scales.input),
        forward_weight(weight, formats, scales.weight),
    )


def _operand(
    x: Tensor,
    target: Format | BlockFormat,
    along: Along,
    formats: ProductFormats,
    past: Tensor | None,
    *,
    weight: bool = False,
) -> Tensor:
    scale = past if is_delayed(target) else None
    how = Scaled(target, along, formats.scaling, scale, weight)
    return straight(x, how, torch.float32, formats.output)


def _product(left: Tensor, right: Tensor, formats: ProductFormats) -> Tensor:
    return straight(left @ right, formats.output, torch.float32, formats.output)


def _result(output: Tensor, x: Tensor, formats: ProductFormats) -> Tensor:
    """Round an output, as the input's dtype where that is the format's own."""
    own = x.dtype == formats.output.dtype and formats.output is not FP32
    dtype = x.dtype if own else torch.float32
    result = straight(output, formats.output, dtype, formats.output)
    return result.reshape(*x.shape[:-1], output.shape[-1])
