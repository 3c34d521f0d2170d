"""The programs that norms share. Sums over rows are in fp32 and always in the same order."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import Launcher

_TILE = 4096  # elements a program holds: 32 for each of 128 threads
_PROGRAMS = 4  # a processor, in the backward pass: each writes a partial sum


def write_normed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    rounds: bool = False,
    centred: bool = False,
) -> None:
    """Write the rows of `x`, normalised, to `out`."""
    x, weight = x.contiguous(), weight.contiguous()
    width = weight.numel()
    rows, together, wide = _cut(x, width)
    added = weight if bias is None else bias.contiguous()
    _launch_forward(
        (-(-rows // together), 1, 1),
        (x, weight, added, out),
        (rows, width),
        (eps, offset, rounds, centred, bias is not None, together, wide),
        num_warps=_warps(together * wide),
    )


def backward_normed(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    rounds: bool = False,
    centred: bool = False,
    needs_weight: bool,
    needs_bias: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of the input, and those of weight and bias, of what needs one."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grad_x, width = torch.empty_like(x), weight.numel()
    rows, together, wide = _cut(x, width)
    tiles = -(-rows // together)
    # A power of two, so that few kernels are compiled for whatever number of rows there is.
    turns = _power_of_2(-(-tiles // (_PROGRAMS * _processors(x.device))))
    programs = -(-tiles // turns)
    summed = needs_weight + needs_bias
    partial = x.new_empty((summed, programs, width), dtype=torch.float32)
    _launch_backward(
        (programs, 1, 1),
        (grad, x, weight, grad_x, partial),
        (rows, width),
        (eps, offset, turns, needs_weight, needs_bias, rounds, centred, together, wide),
        num_warps=_warps(together * wide),
    )
    # Each by itself: results of an operator may not share memory.
    sums = [partial.sum((0, 1))] if summed == 1 else [each.sum(0) for each in partial]
    if weight.dtype != torch.float32 or weight.dim() != 1:
        sums = [each.to(weight.dtype).view_as(weight) for each in sums]
    return grad_x, sums


def _cut(x: Tensor, width: int) -> tuple[int, int, int]:
    """Return how many rows there are, how many go at once, and the power of two above the width."""
    wide = _power_of_2(width)
    return x.numel() // width, max(_TILE // wide, 1), wide


def _power_of_2(count: int) -> int:
    """Return the power of two that is as large, or the next; Triton's own takes the host longer."""
    return 1 << (count - 1).bit_length()


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
    bias,
    out,
    rows,
    width,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    location = tl.arange(0, WIDTH)
    inside = location < width
    at = row[:, None] * width + location[None, :]
    here = (row < rows)[:, None] & inside[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    factor = tl.load(weight + location, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if CENTRED:
        value = tl.where(here, value - (tl.sum(value, 1) / width)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + EPS)
    normed = value * inverse[:, None]
    if ROUNDS:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    result = normed * factor[None, :]
    if HAS_BIAS:
        result += tl.load(bias + location, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def _backward(
    grad,
    x,
    weight,
    grad_x,
    partial,
    rows,
    width,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    TURNS: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    ROUNDS: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    position = tl.arange(0, WIDTH)
    inside = position < width
    factor = tl.load(weight + position, mask=inside, other=0.0).to(tl.float32) + OFFSET
    by_weight = tl.zeros((WIDTH,), dtype=tl.float32)
    by_bias = tl.zeros((WIDTH,), dtype=tl.float32)
    for turn in range(TURNS):
        first = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * width + position[None, :]
        here = (row < rows)[:, None] & inside[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        down = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        if CENTRED:
            value = tl.where(here, value - (tl.sum(value, 1) / width)[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + EPS)
        # Without an epsilon rows beyond the last would be no numbers, and so would the sums.
        normed = tl.where(here, value * inverse[:, None], 0.0)
        through = down * factor[None, :]
        back = through - normed * (tl.sum(through * normed, 1) / width)[:, None]
        if CENTRED:
            back -= (tl.sum(through, 1) / width)[:, None]
        back = back * inverse[:, None]
        tl.store(grad_x + at, back.to(grad_x.dtype.element_ty), mask=here)
        if NEEDS_WEIGHT:
            if ROUNDS:
                normed = normed.to(x.dtype.element_ty).to(tl.float32)
            by_weight += tl.sum(down * normed, 0)
        if NEEDS_BIAS:
            by_bias += tl.sum(down, 0)
    own = partial + tl.program_id(0) * width + position
    if NEEDS_WEIGHT:
        tl.store(own, by_weight, mask=inside)
        own += tl.num_programs(0) * width
    if NEEDS_BIAS:
        tl.store(own, by_bias, mask=inside)


_launch_forward, _launch_backward = Launcher(_forward), Launcher(_backward)
