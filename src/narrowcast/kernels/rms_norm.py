"""A row divided by its root mean square and multiplied by a weight: one read, one write.

Composed in torch, a 16-bit row is widened, squared, averaged, multiplied and narrowed, each a pass,
and the widened row is kept twice for the backward pass: 8 bytes an element. Here the forward pass
moves 2 bytes in and 2 out, and keeps its input; the backward pass reads input and gradient, finds
the root mean square again, and writes 2 bytes. The weight's gradient is summed in fp32, by each
program over its own rows and then over programs: always in the same order. Inside `torch.compile`
these are the operators `narrowcast::rms_norm` and `narrowcast::rms_norm_back`.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = 4096  # elements a program holds: 32 for each of 128 threads
_PROGRAMS = 4  # a processor, in the backward pass: each writes a partial sum


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, offset: float, rounds: bool, dtype: torch.dtype
) -> Tensor:
    """Return x / rms(x) · (weight + offset), in `dtype`, computed in fp32.

    With `rounds` the quotient is rounded to the dtype of `x` before it meets the weight, as some
    models do. `weight` is of the width of `x`'s last dimension.
    """
    result: Tensor = _apply(x, weight, eps, offset, rounds, dtype)
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        rounds: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = eps, offset, rounds
        result: Tensor = torch.ops.narrowcast.rms_norm(x, weight, eps, offset, rounds, dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[1]
        grad_x, grad_weight = torch.ops.narrowcast.rms_norm_back(
            grad, x, weight, *ctx.settings, needs
        )
        return grad_x, grad_weight if needs else None, None, None, None, None


_apply: Any = _RmsNorm.apply


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounds: bool, dtype: torch.dtype
) -> Tensor:
    result: Tensor = _normed_shape(x, weight, eps, offset, rounds, dtype)
    x, weight = x.contiguous(), weight.contiguous()
    width = weight.numel()
    rows, together, wide = _cut(x, width)
    _forward[(triton.cdiv(rows, together),)](
        x,
        weight,
        result,
        rows,
        width,
        eps,
        offset,
        ROUNDS=rounds,
        ROWS=together,
        WIDTH=wide,
        num_warps=_warps(together * wide),
    )
    return result


def _rms_norm_back(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    rounds: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grad_x, width = torch.empty_like(x), weight.numel()
    rows, together, wide = _cut(x, width)
    tiles = triton.cdiv(rows, together)
    # A power of two, so that few kernels are compiled for whatever number of rows there is.
    turns = triton.next_power_of_2(triton.cdiv(tiles, _PROGRAMS * _processors(x.device)))
    programs = triton.cdiv(tiles, turns)
    partial = x.new_empty((programs if needs_weight else 0, width), dtype=torch.float32)
    _backward[(programs,)](
        grad,
        x,
        weight,
        grad_x,
        partial,
        rows,
        width,
        eps,
        offset,
        TURNS=turns,
        NEEDS_WEIGHT=needs_weight,
        ROUNDS=rounds,
        ROWS=together,
        WIDTH=wide,
        num_warps=_warps(together * wide),
    )
    return grad_x, partial.sum(0).to(weight.dtype) if needs_weight else weight.new_empty(0)


def _cut(x: Tensor, width: int) -> tuple[int, int, int]:
    """Return how many rows there are, how many go at once, and the power of two above the width."""
    wide = triton.next_power_of_2(width)
    return x.numel() // width, max(_TILE // wide, 1), wide


def _warps(elements: int) -> int:
    return min(max(elements // 1024, 4), 16)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # interpreted
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _forward(
    x,
    weight,
    out,
    rows,
    width,
    eps,
    offset,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, WIDTH)
    at = row[:, None] * width + place[None, :]
    here = (row < rows)[:, None] & (place < width)[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    factor = tl.load(weight + place, mask=place < width, other=0.0).to(tl.float32) + offset
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    normed = value * inverse[:, None]
    if ROUNDS:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (normed * factor[None, :]).to(out.dtype.element_ty), mask=here)


@triton.jit
def _backward(
    grad,
    x,
    weight,
    grad_x,
    partial,
    rows,
    width,
    eps,
    offset,
    TURNS: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place = tl.arange(0, WIDTH)
    inside = place < width
    factor = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for turn in range(TURNS):
        first = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * width + place[None, :]
        here = (row < rows)[:, None] & inside[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        down = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
        normed = value * inverse[:, None]
        through = down * factor[None, :]
        along = tl.sum(through * normed, 1) / width
        back = (through - normed * along[:, None]) * inverse[:, None]
        tl.store(grad_x + at, back.to(grad_x.dtype.element_ty), mask=here)
        if NEEDS_WEIGHT:
            if ROUNDS:
                normed = normed.to(x.dtype.element_ty).to(tl.float32)
            total += tl.sum(down * normed, 0)
    if NEEDS_WEIGHT:
        tl.store(partial + tl.program_id(0) * width + place, total, mask=inside)


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, bool rounds, ScalarType dtype)"
    " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "rms_norm_back(Tensor grad, Tensor x, Tensor weight, float eps, float offset, bool rounds,"
    " bool needs_weight) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
_library.impl("rms_norm_back", _rms_norm_back, "CompositeExplicitAutograd")


@torch.library.register_fake("narrowcast::rms_norm")
def _normed_shape(
    x: Tensor, weight: Tensor, eps: float, offset: float, rounds: bool, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.register_fake("narrowcast::rms_norm_back")
def _back_shapes(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    rounds: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, torch.empty_like(weight) if needs_weight else weight.new_empty(0)
