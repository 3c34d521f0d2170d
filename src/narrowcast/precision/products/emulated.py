"""Emulated products: operands rounded to a format, multiplied in fp32, the result rounded.

This is what a machine without the arithmetic does in its place. The values equal those of the
hardware up to the order of summation, because both multiply the same rounded operands exactly and
add them in fp32. A tensor keeps its dtype on the way: fp32 values lie on the format's grid, so a
model runs unchanged, and no native 16-bit product is ever asked of a CPU that lacks it.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.numerics import FP32, TF32, Format
from narrowcast.numerics.carriers import CHUNK
from narrowcast.precision.products.operands import (
    ProductFormats,
    is_delayed,
    needs_scale,
    operand,
    rounded,
)

_Method = TypeVar("_Method", bound=Callable[..., Any])


TRACED_RIGHTLY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch's compiler keeps the gradients of these autograd functions. That of 2.11 makes them
all zero, without a word; that of 2.13 does not, and those between are not known."""


def _traced_if_right(function: _Method) -> _Method:
    """Keep a function out of compiled graphs where its gradients would be lost in them."""
    return function if TRACED_RIGHTLY else cast(_Method, torch.compiler.disable(function))


class PastScales(Protocol):
    """Scales of a module's fp8 operands that come from past steps."""

    def scale(self, x: Tensor, target: Format, role: str) -> Tensor:
        """Return the scale of a role that is in force, and take note of this matrix."""


@_traced_if_right
def linear_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    formats: ProductFormats,
    history: PastScales | None = None,
) -> Tensor:
    """Return input · weightᵀ + bias, with each of the three products in its own format."""
    scales: tuple[Tensor, Tensor] | None = None
    if history is not None and is_delayed(formats.forward):
        assert isinstance(formats.forward, Format)
        scales = (
            history.scale(x, formats.forward, "input"),
            history.scale(weight, formats.forward, "weight"),
        )
    # Under a native region around it, autocast would round these operands a second time.
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = _linear_product(x, weight, bias, formats, scales, history)
    return result


def _unseen(method: _Method) -> _Method:
    """Let what a method calls pass by function modes, each of which would look at every call."""

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(*args)
        with torch._C.DisableTorchFunction():
            return method(*args)

    return cast(_Method, run)


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    @_unseen
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        formats: ProductFormats,
        scales: tuple[Tensor, Tensor] | None,
        history: PastScales | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()  # (rows, in)
        wide_weight = weight.float()  # (out, in)
        x_scale, weight_scale = scales if scales is not None else (None, None)
        rounded_x = operand(rows, formats.forward, "row", formats.scaling, x_scale)
        rounded_weight = operand(
            wide_weight, formats.forward, "row", formats.scaling, weight_scale, weight=True
        )
        # The aten overloads are below the function mode that would round these operands again.
        transposed = rounded_weight.t()
        rounded_bias = None if bias is None else rounded(bias.float(), formats.output)
        if rounded_bias is None:
            output = torch.ops.aten.mm.default(rounded_x, transposed)
        elif needs_scale(formats.forward.name):
            # An 8-bit product returns 16 bits, and the bias is added to those.
            output = torch.ops.aten.mm.default(rounded_x, transposed)
            output = _rounded_fresh(output, formats.output).add_(rounded_bias)
        else:
            output = torch.ops.aten.addmm.default(rounded_bias, rounded_x, transposed)
        if formats.one_rounding:
            ctx.save_for_backward(rounded_x, rounded_weight)
        else:
            ctx.save_for_backward(rows, wide_weight)
        ctx.formats, ctx.history, ctx.scales = formats, history, (x_scale, weight_scale)
        ctx.x_shape, ctx.x_dtype, ctx.has_bias = x.shape, x.dtype, bias is not None
        output = output.view(*x.shape[:-1], weight.shape[0])
        return _in_carrier(output, formats.output, x.dtype, rounding=_rounded_fresh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Activation checkpointing runs the forward pass again for these, in its region.
        x, weight = ctx.saved_tensors
        return _LinearProduct.gradients(ctx, grad_output, x, weight)

    @staticmethod
    @_unseen
    def gradients(
        ctx: Any, grad_output: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        formats: ProductFormats = ctx.formats
        grad = grad_output.reshape(-1, grad_output.shape[-1]).float()  # (rows, out)
        # What comes back has the format of what went out.
        grad = rounded(grad, formats.output)
        grad_x = grad_weight = grad_bias = None
        scale = None
        if ctx.history is not None and is_delayed(formats.grad_input):
            scale = ctx.history.scale(grad, formats.grad_input, "grad_output")
        rounded_grad = None
        if ctx.needs_input_grad[0]:
            rounded_grad = grad
            if formats.grad_input is not formats.output:
                rounded_grad = operand(grad, formats.grad_input, "row", formats.scaling, scale)
            beside = weight
            if not formats.one_rounding:
                other = formats.other_operand(formats.grad_input)
                past = ctx.scales[1] if is_delayed(other) else None
                beside = operand(weight, other, "column", formats.scaling, past, weight=True)
            grad_x = _rounded_fresh(torch.ops.aten.mm.default(rounded_grad, beside), formats.output)
            grad_x = grad_x.view(ctx.x_shape).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if formats.grad_weight != formats.grad_input:
                scale = None  # the history is for the other product's format
            if rounded_grad is None or not formats.one_rounding:
                rounded_grad = operand(grad, formats.grad_weight, "column", formats.scaling, scale)
            beside = x
            if not formats.one_rounding:
                other = formats.other_operand(formats.grad_weight)
                past = ctx.scales[0] if is_delayed(other) else None
                beside = operand(x, other, "column", formats.scaling, past)
            grad_weight = torch.ops.aten.mm.default(rounded_grad.t(), beside)
            grad_weight = _rounded_fresh(grad_weight, formats.output)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rounded(grad.sum(0), formats.output)
        return grad_x, grad_weight, grad_bias, None, None, None


@_traced_if_right
def rounded_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Format
) -> Any:
    """Call a product with its tensors, their gradients and its result rounded to `target`.

    Sound for any function that is a product of its arguments, whatever its signature.
    """
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    carrier = _widest(args, kwargs)
    with torch._C.DisableTorchFunction():
        result = function(
            *[_map_floats(a, lambda t: _round_operand(t, target)) for a in args],
            **{k: _map_floats(a, lambda t: _round_operand(t, target)) for k, a in kwargs.items()},
        )
        result = _map_floats(result, lambda t: _round_result(t, target, carrier))
        return result if out is None else out.copy_(result)


class _RoundOperand(torch.autograd.Function):
    """Round on the way in; on the way back round the gradient this operand receives."""

    @staticmethod
    @_unseen
    def forward(ctx: Any, x: Tensor, target: Format) -> Tensor:
        ctx.target, ctx.dtype = target, x.dtype
        return rounded(x.float(), target)

    @staticmethod
    @_unseen
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rounded(grad, _returned(ctx.target)).to(ctx.dtype), None


class _RoundResult(torch.autograd.Function):
    """Round on the way out; on the way back round the gradient that enters the product."""

    @staticmethod
    @_unseen
    def forward(ctx: Any, x: Tensor, target: Format, carrier: torch.dtype) -> Tensor:
        ctx.target = target
        return _in_carrier(x, _returned(target), carrier)

    @staticmethod
    @_unseen
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rounded(grad.float(), ctx.target), None, None


# `apply` has no types in torch.
_linear_product: Any = _LinearProduct.apply
_round_operand: Any = _RoundOperand.apply
_round_result: Any = _RoundResult.apply


def _returned(target: Format) -> Format:
    """A tf32 product returns fp32."""
    return FP32 if target is TF32 else target


def _rounded_fresh(x: Tensor, target: Format) -> Tensor:
    """Round a tensor that nobody else holds: in place where that is faster, which is on a CPU."""
    sixteen_bits = target.dtype in (torch.bfloat16, torch.float16)
    eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (sixteen_bits and eager_cpu and x.is_contiguous()):
        return rounded(x, target)
    assert target.dtype is not None
    for piece in x.view(-1).split(CHUNK):  # stays in the cache between the two casts
        piece.copy_(piece.to(target.dtype))
    return x


def _in_carrier(
    x: Tensor,
    target: Format,
    carrier: torch.dtype,
    *,
    rounding: Callable[[Tensor, Format], Tensor] = rounded,
) -> Tensor:
    """Round fp32 values; hand them on in the stream's dtype where it is the format's own."""
    if carrier == target.dtype and target is not FP32:
        # Compilers drop a cast whose result is widened again; what is rounded first stays rounded.
        return (rounded(x, target) if torch.compiler.is_compiling() else x).to(carrier)
    return rounding(x, target)


def _widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    found: list[torch.dtype] = []
    for value in (*args, *kwargs.values()):
        _map_floats(value, lambda t: found.append(t.dtype) or t)  # type: ignore[func-returns-value]
    wide = {torch.float32, torch.float64} & set(found)
    return torch.float32 if wide or len(set(found)) != 1 else found[0]


def _map_floats(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_map_floats(v, change) for v in value)
    return value
