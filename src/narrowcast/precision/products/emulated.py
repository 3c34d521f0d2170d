"""Emulated products: operands rounded to a format, multiplied in fp32, the result rounded.

Values equal those of the hardware up to the order of summation. Tensors keep their dtype: fp32
values lie on the format's grid.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.numerics import FP32, TF32, Format
from narrowcast.numerics.methods import CHUNK
from narrowcast.precision.products import differentiable
from narrowcast.precision.products.autocast import autocast_off
from narrowcast.precision.products.differentiable import OperandScales
from narrowcast.precision.products.operands import (
    ProductFormats,
    is_delayed,
    is_transformed,
    operand,
    rounded,
    straight,
    unseen,
)


def of_jagged_rows(product: Callable[[Tensor, Tensor], Tensor], x: Any, weight: Tensor) -> Tensor:
    """Return the product of each row and a weight, in rows of the same lengths."""
    if x._ragged_idx != 1:
        raise UnsupportedError(
            "A linear layer needs jagged tensors whose lengths differ in dimension 1, got "
            f"dimension {x._ragged_idx}. Transpose the input back."
        )
    return torch.nested.nested_tensor_from_jagged(
        product(x.values(), weight),
        x.offsets(),
        x.lengths(),
        min_seqlen=x._maybe_min_seqlen,
        max_seqlen=x._maybe_max_seqlen,
    )


_Method = TypeVar("_Method", bound=Callable[..., Any])


TRACED_RIGHTLY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch's compiler keeps the gradients of these autograd functions. That of 2.11 silently
makes them all zero, that of 2.13 does not; those between are unknown."""


def _traced_if_right(function: _Method) -> _Method:
    """Keep a function out of compiled graphs where its gradients would be lost in them."""
    return function if TRACED_RIGHTLY else cast(_Method, torch.compiler.disable(function))


CAST_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What a 16-bit region takes in hand."""


class PastScales(Protocol):
    """Scales of a module's fp8 operands that come from past steps."""

    def scale(self, x: Tensor, target: Format, role: str) -> Tensor:
        """Return the scale of a role that is in force, and take note of this matrix."""

    def scale_of_past(self, role: str) -> Tensor | None:
        """Return the scale of a role that past steps have decided, and take note of nothing."""


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
    if x.is_nested and x.layout is torch.jagged:
        product = partial(linear_product, bias=bias, formats=formats, history=history)
        return of_jagged_rows(product, x, weight)
    # Under a region around it, autocast would round these operands a second time.
    with autocast_off(x.device.type):
        if x.dtype not in CAST_DTYPES or weight.dtype not in CAST_DTYPES:
            with torch._C.DisableTorchFunction():
                return F.linear(x, weight, bias)  # autocast leaves these as they are, too
        if is_transformed():
            scales = _scales_of_past(formats, history)
            return differentiable.transformed_linear(
                x, weight, bias, formats=formats, scales=scales
            )
        past: tuple[Tensor, Tensor] | None = None
        if history is not None and is_delayed(formats.forward):
            assert isinstance(formats.forward, Format)
            past = (
                history.scale(x, formats.forward, "input"),
                history.scale(weight, formats.forward, "weight"),
            )
        trained = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        linked = trained and not torch.compiler.is_compiling()
        result = _linear_product(x, weight, bias, formats, past, history, linked)
        output: Tensor = result[0] if linked else result
        return output


def _scales_of_past(formats: ProductFormats, history: PastScales | None) -> OperandScales:
    """Return the scales in force in a `torch.func` transform; its gradients get their own."""
    if history is None or not is_delayed(formats.forward):
        return OperandScales()
    return OperandScales(history.scale_of_past("input"), history.scale_of_past("weight"))


class _LinearProduct(torch.autograd.Function):
    """The three products of a linear layer.

    If input and weight have gradients there is a second output, the link. It is never read, but its
    gradient is one of the input, so second derivatives need not keep the input itself.
    """

    @staticmethod
    @unseen
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        formats: ProductFormats,
        scales: tuple[Tensor, Tensor] | None,
        history: PastScales | None,
        linked: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
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
        elif formats.rounds_before_bias:
            output = torch.ops.aten.mm.default(rounded_x, transposed)
            output = _rounded_fresh(output, formats.output)
            output = output + rounded_bias if _results_are_saved() else output.add_(rounded_bias)
        else:
            output = torch.ops.aten.addmm.default(rounded_bias, rounded_x, transposed)
        stored = (rounded_x, rounded_weight) if formats.one_rounding else (rows, wide_weight)
        ctx.formats, ctx.history, ctx.scales = formats, history, (x_scale, weight_scale)
        ctx.x_shape, ctx.x_dtype, ctx.has_bias = x.shape, x.dtype, bias is not None
        # Not as a view, so that callers may write to the result in place.
        output = torch.ops.aten._unsafe_view.default(output, (*x.shape[:-1], weight.shape[0]))
        output = _in_carrier(output, formats.output, x.dtype, rounding=_rounded_fresh)
        if not linked:
            ctx.save_for_backward(*stored)
            return output
        link = x.new_zeros(1).expand(rows.shape)  # one number of memory
        ctx.save_for_backward(*stored, link)
        ctx.weight = weight  # not saved: an update between the passes is none of its business
        ctx.set_materialize_grads(False)
        return output, link

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_link: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        matches: tuple[Tensor | None, ...] = (None, None, None)
        if grad_output is not None:
            # Activation checkpointing runs the forward pass again for these, in its region.
            x, weight, *links = ctx.saved_tensors
            with autocast_off(grad_output.device.type):
                if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                    matches = _LinearProduct.second(ctx, grad_output, x, weight, links)
                else:
                    matches = _LinearProduct.gradients(ctx, grad_output, x, weight)
        if grad_link is not None:
            through = grad_link.view(ctx.x_shape)
            matches = (through if matches[0] is None else matches[0] + through, *matches[1:])
        return *matches, None, None, None, None

    @staticmethod
    @unseen
    def second(
        ctx: Any, grad_output: Tensor, x: Tensor, weight: Tensor, links: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients as what can be differentiated again."""
        formats: ProductFormats = ctx.formats
        grad = grad_output.reshape(-1, grad_output.shape[-1])  # (rows, out)
        if links:
            x, weight = differentiable.tied(x, links[0]), differentiable.tied(weight, ctx.weight)
        needs = (*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2])
        of_grad = _noted_scale(ctx, rounded(grad.float(), formats.output))
        scales = OperandScales(ctx.scales[0], ctx.scales[1], of_grad)
        grad_x, *rest = differentiable.gradients(
            grad, x, weight, formats=formats, scales=scales, needs=needs
        )
        if grad_x is not None:
            grad_x = grad_x.view(ctx.x_shape).to(ctx.x_dtype)
        return grad_x, *rest

    @staticmethod
    @unseen
    def gradients(
        ctx: Any, grad_output: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients, with results rounded where they lie."""
        formats: ProductFormats = ctx.formats
        grad = grad_output.reshape(-1, grad_output.shape[-1]).float()  # (rows, out)
        # What comes back has the format of what went out.
        grad = rounded(grad, formats.output)
        grad_x = grad_weight = grad_bias = None
        scale = _noted_scale(ctx, grad)
        rounded_grad = None
        if ctx.needs_input_grad[0]:
            rounded_grad = grad
            if formats.grad_input is not formats.output:
                rounded_grad = operand(grad, formats.grad_input, "row", formats.scaling, scale)
            extra = weight
            if not formats.one_rounding:
                other = formats.other_operand(formats.grad_input)
                past = ctx.scales[1] if is_delayed(other) else None
                extra = operand(weight, other, "column", formats.scaling, past, weight=True)
            grad_x = _rounded_fresh(torch.ops.aten.mm.default(rounded_grad, extra), formats.output)
            grad_x = grad_x.view(ctx.x_shape).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if formats.grad_weight.name != formats.grad_input.name:
                scale = None  # the history is for the other product's format
            if rounded_grad is None or not formats.one_rounding:
                rounded_grad = operand(grad, formats.grad_weight, "column", formats.scaling, scale)
            extra = x
            if not formats.one_rounding:
                other = formats.other_operand(formats.grad_weight)
                past = ctx.scales[0] if is_delayed(other) else None
                extra = operand(x, other, "column", formats.scaling, past)
            grad_weight = torch.ops.aten.mm.default(rounded_grad.t(), extra)
            grad_weight = _rounded_fresh(grad_weight, formats.output)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rounded(grad.sum(0), formats.output)
        return grad_x, grad_weight, grad_bias


def _noted_scale(ctx: Any, grad: Tensor) -> Tensor | None:
    """Return the scale of a gradient from past steps, which take note of this one."""
    formats: ProductFormats = ctx.formats
    if ctx.history is None or not is_delayed(formats.grad_input):
        return None
    scale: Tensor = ctx.history.scale(grad.detach(), formats.grad_input, "grad_output")
    return scale


def is_cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether autocast would cast the operands of a call; it never casts float64."""
    matched: set[torch.dtype] = set()
    for value in (*args, *kwargs.values()):
        _map_floats(value, lambda t: matched.add(t.dtype))
    return matched <= CAST_DTYPES


@_traced_if_right
def rounded_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Format
) -> Any:
    """Call any product with its tensors, gradients and result rounded to `target`."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    carrier = widest_float(args, kwargs)
    with torch._C.DisableTorchFunction():
        result = function(
            *[_map_floats(a, lambda t: _round_operand(t, target)) for a in args],
            **{k: _map_floats(a, lambda t: _round_operand(t, target)) for k, a in kwargs.items()},
        )
        result = _map_floats(result, lambda t: _round_result(t, target, carrier))
        return result if out is None else out.copy_(result)


def _round_operand(x: Tensor, target: Format) -> Tensor:
    """Round on the way in; on the way back round the gradient this operand receives."""
    return straight(x, target, torch.float32, _returned(target))


def _round_result(x: Tensor, target: Format, carrier: torch.dtype) -> Tensor:
    """Round on the way out; on the way back round the gradient that enters the product."""
    returned = _returned(target)
    own = carrier == returned.dtype and returned is not FP32
    return straight(x, returned, carrier if own else torch.float32, target)


# `apply` has no types in torch.
_linear_product: Any = _LinearProduct.apply


def _returned(target: Format) -> Format:
    """A tf32 product returns fp32."""
    return FP32 if target is TF32 else target


def _rounded_fresh(x: Tensor, target: Format) -> Tensor:
    """Round a tensor without other references: in place on a CPU, where that is faster."""
    sixteen_bits = target.dtype in (torch.bfloat16, torch.float16)
    eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (sixteen_bits and eager_cpu and x.is_contiguous()) or _results_are_saved():
        return rounded(x, target)
    assert target.dtype is not None
    for piece in x.view(-1).split(CHUNK):  # stays in the cache between the two casts
        piece.copy_(piece.to(target.dtype))
    return x


def _results_are_saved() -> bool:
    """Return whether results of products may be kept by a mode, as selective checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


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


def widest_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Return the one dtype of all tensors of numbers, and fp32 where they have several or none."""
    matches: list[torch.dtype] = []
    for value in (*args, *kwargs.values()):
        _map_floats(value, lambda t: matches.append(t.dtype) or t)  # type: ignore[func-returns-value]
    wide = {torch.float32, torch.float64} & set(matches)
    return torch.float32 if wide or len(set(matches)) != 1 else matches[0]


def _map_floats(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_map_floats(v, change) for v in value)
    return value
