"""The product of an activated gate and a value (SwiGLU, GeGLU), in one pass each way.

Computed in fp32 and rounded once. If gate and value are halves of one tensor, so are their
gradients.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.gelu_arithmetic import share_and_slope
from narrowcast.kernels.launch import Launcher, interpreted, is_traced

Activation = Literal["silu", "gelu", "gelu_tanh"]

_BLOCK = 1024  # elements of a program: 16 bytes a load in each of 128 threads
_BY_BITS = interpreted()


def gated(gate: Tensor, value: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) · value; of one shape and dtype."""
    result: Tensor = _apply(gate, value, activation)
    return result


def gated_halves(both: Tensor, activation: Activation) -> Tensor:
    """Return activation(first half) · second half, of the last dimension."""
    result: Tensor = _apply_halves(both, activation)
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, value)
        ctx.activation = activation
        call = torch.ops.narrowcast.gated if is_traced(gate, value) else _gated
        result: Tensor = call(gate, value, activation)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, value = ctx.saved_tensors
        if is_traced(grad, gate, value):
            both = torch.ops.narrowcast.gated_back(grad, gate, value, ctx.activation, False)
            return both[0], both[1], None
        grads = [torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2)]
        _write_back(grad, gate, value, ctx.activation, grads[0], grads[1])
        return grads[0], grads[1], None


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(both)
        ctx.activation = activation
        call = torch.ops.narrowcast.gated if is_traced(both) else _gated
        gate, value = both.chunk(2, -1)
        result: Tensor = call(gate, value, activation)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        call = torch.ops.narrowcast.gated_back if is_traced(grad, both) else _gated_back
        gate, value = both.chunk(2, -1)
        return call(grad, gate, value, ctx.activation, True), None


_apply: Any = _Gated.apply
_apply_halves: Any = _GatedHalves.apply


def _gated(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    result: Tensor = _product_shape(gate, value, activation)
    gate, value, rows, sizes = _rows(gate, value)
    _launch_forward(
        (rows * -(-sizes[0] // _BLOCK), 1, 1),
        (gate, value, result),
        sizes,
        (activation, _BY_BITS, _BLOCK),
        num_warps=4,
    )
    return result


def _gated_back(grad: Tensor, gate: Tensor, value: Tensor, activation: str, halves: bool) -> Tensor:
    result: Tensor = _back_shape(grad, gate, value, activation, halves)
    first, second = result.chunk(2, -1) if halves else result
    _write_back(grad, gate, value, activation, first, second, halves=halves)
    return result


def _write_back(
    grad: Tensor,
    gate: Tensor,
    value: Tensor,
    activation: str,
    grad_gate: Tensor,
    grad_value: Tensor,
    *,
    halves: bool = False,
) -> None:
    """Write the gradients of gate and value, dense or as halves of one tensor."""
    gate, value, rows, sizes = _rows(gate, value, separate=halves)
    width = sizes[0]
    _launch_backward(
        (rows * -(-width // _BLOCK), 1, 1),
        (grad.contiguous(), gate, value, grad_gate, grad_value),
        (*sizes, 2 * width if halves else width),
        (activation, _BY_BITS, _BLOCK),
        num_warps=4,
    )


def _rows(
    gate: Tensor, value: Tensor, *, separate: bool = False
) -> tuple[Tensor, Tensor, int, tuple[int, int, int]]:
    """Return both as dense rows, with count, width and strides; one row if contiguous."""
    if gate.is_contiguous() and value.is_contiguous() and not separate:
        count = gate.numel()
        return gate, value, 1, (count, count, count)
    width = gate.shape[-1]
    flat = [x.reshape(-1, width) for x in (gate, value)]  # halves of one tensor stay where they are
    gate, value = (x if x.stride(1) == 1 else x.contiguous() for x in flat)
    return gate, value, gate.shape[0], (width, gate.stride(0), value.stride(0))


@triton.jit
def _forward(
    gate,
    value,
    out,
    width,
    gate_row,
    value_row,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(width, BLOCK)
    row, location = program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
    here = location < width
    a = tl.load(gate + row * gate_row + location, mask=here, other=0.0).to(tl.float32)
    b = tl.load(value + row * value_row + location, mask=here, other=0.0).to(tl.float32)
    share, _ = share_and_slope(a, ACTIVATION, BY_BITS)
    product = a * share * b
    tl.store(out + row * width + location, product.to(out.dtype.element_ty), mask=here)


@triton.jit
def _backward(
    grad,
    gate,
    value,
    grad_gate,
    grad_value,
    width,
    gate_row,
    value_row,
    grad_row,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(width, BLOCK)
    row, position = program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
    here = position < width
    down = tl.load(grad + row * width + position, mask=here, other=0.0).to(tl.float32)
    a = tl.load(gate + row * gate_row + position, mask=here, other=0.0).to(tl.float32)
    b = tl.load(value + row * value_row + position, mask=here, other=0.0).to(tl.float32)
    share, slope = share_and_slope(a, ACTIVATION, BY_BITS)
    at = row * grad_row + position
    tl.store(grad_gate + at, (down * b * slope).to(grad_gate.dtype.element_ty), mask=here)
    tl.store(grad_value + at, (down * a * share).to(grad_value.dtype.element_ty), mask=here)


_launch_forward, _launch_backward = Launcher(_forward), Launcher(_backward)
_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "gated(Tensor gate, Tensor value, str activation) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "gated_back(Tensor grad, Tensor gate, Tensor value, str activation, bool halves) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("gated", _gated, "CompositeExplicitAutograd")
_library.impl("gated_back", _gated_back, "CompositeExplicitAutograd")


@torch.library.register_fake("narrowcast::gated")
def _product_shape(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.register_fake("narrowcast::gated_back")
def _back_shape(grad: Tensor, gate: Tensor, value: Tensor, activation: str, halves: bool) -> Tensor:
    """The gradients of gate and value: side by side as halves, or one after the other"""
    if halves:
        return gate.new_empty((*gate.shape[:-1], 2 * gate.shape[-1]))
    return gate.new_empty((2, *gate.shape))
