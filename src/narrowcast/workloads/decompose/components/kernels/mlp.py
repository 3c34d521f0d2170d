"""A small MLP for each component, from one number to one, whose hidden layer is never in memory.

Forward and for the gradient of its input, programs hold a tile of rows and components and go
through the hidden units. For the gradients of its weights a thread holds a component's units, as
many as its registers do, and goes through rows; sums of row blocks are added up afterwards, always
in the same order. Where the units fit into registers at once, that pass gives the input's gradient
too, and the activation is computed once. All in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.gelu_arithmetic import share_and_gauss
from narrowcast.kernels.launch import interpreted, launch_kernel

_ROWS, _COLUMNS = 32, 64  # of a tile: 16 elements for each of 128 threads
_UNITS = 16  # that a thread holds: three weights of each and three sums are 96 registers
_LANES = 32  # components of a program that sums weights' gradients: one for each thread of a warp
_BLOCK = 8 if interpreted() else 256  # rows of such a program; the interpreter takes ms for each


def mlp_forward(h: Tensor, weights: Tensor, last: Tensor) -> Tensor:
    """Return the like of `h`, (seeds, rows, components).

    `weights` are w1, b1 and w2 as one, (3, seeds, units, components): neighbours in memory are for
    neighbouring threads. `last` is b2.
    """
    out = torch.empty_like(h)
    _through_units(h, h, weights, last, out, back=False)
    return out


def mlp_backward(grad: Tensor, h: Tensor, weights: Tensor, *, to_h: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input, empty unless `to_h`, and of w1, b1, w2 and b2.

    The latter stand one after another, each as parameters do, (seeds, components, units): as they
    are, they can be those of parameters, and none is copied.
    """
    seeds, rows, count = h.shape
    units = weights.shape[2]
    pieces = triton.cdiv(units, _UNITS)
    blocks = triton.cdiv(rows, _BLOCK)
    grad_h = torch.empty_like(h) if to_h else h.new_empty(0)
    sums = torch.empty((blocks, weights.numel() + seeds * count), device=h.device)
    launch_kernel(
        _through_rows,
        (triton.cdiv(count, _LANES) * pieces, blocks, seeds),
        grad,
        h,
        weights,
        grad_h,
        sums,
        rows,
        count,
        units,
        pieces,
        TO_H=to_h and pieces == 1,
        BY_BITS=interpreted(),
        BLOCK=_BLOCK,
        LANES=_LANES,
        UNITS=max(triton.next_power_of_2(min(units, _UNITS)), 2),
        num_warps=1,
    )
    if to_h and pieces > 1:
        _through_units(grad, h, weights, weights, grad_h, back=True)
    return grad_h, sums.sum(0)


def _through_units(
    grad: Tensor, h: Tensor, weights: Tensor, last: Tensor, out: Tensor, *, back: bool
) -> None:
    seeds, rows, count = h.shape
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(count, _COLUMNS), seeds)
    launch_kernel(
        _units,
        grid,
        grad,
        h,
        weights,
        last,
        out,
        rows,
        count,
        HIDDEN=weights.shape[2],
        BACK=back,
        BY_BITS=interpreted(),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _units(
    grad, h, weights, last, out, rows, count,
    HIDDEN: tl.constexpr, BACK: tl.constexpr, BY_BITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seed = tl.program_id(2).to(tl.int64)
    known = column < count
    here = (row < rows)[:, None] & known[None, :]
    at = (seed * rows + row.to(tl.int64))[:, None] * count + column[None, :]
    value = tl.load(h + at, mask=here, other=0.0).to(tl.float32)
    line = weights + seed * HIDDEN * count + column
    separate = tl.num_programs(2).to(tl.int64) * HIDDEN * count  # between w1, b1 and w2
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for unit in range(HIDDEN):
        slope = tl.load(line + unit * count, mask=known, other=0.0)[None, :]
        shift = tl.load(line + unit * count + separate, mask=known, other=0.0)[None, :]
        after = tl.load(line + unit * count + 2 * separate, mask=known, other=0.0)[None, :]
        inner = value * slope + shift
        share, gauss = share_and_gauss(inner, BY_BITS)
        if BACK:
            total += after * slope * (share + inner * gauss * 0.3989422804014327)
        else:
            total += after * inner * share
    if BACK:
        total *= tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    else:
        total += tl.load(last + seed * count + column, mask=known, other=0.0)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def _through_rows(
    grad, h, weights, grad_h, sums, rows, count, units, pieces,
    TO_H: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) // pieces) * LANES + tl.arange(0, LANES)
    unit = (tl.program_id(0) % pieces) * UNITS + tl.arange(0, UNITS)
    block, seed = tl.program_id(1), tl.program_id(2)
    known = column < count
    # Lanes go along components, so that a thread has all units of one.
    inside = (unit < units)[:, None] & known[None, :]
    location = (seed * units + unit)[:, None] * count + column[None, :]
    distance = tl.num_programs(2) * units * count  # between w1, b1 and w2
    slope = tl.load(weights + location, mask=inside, other=0.0)
    shift = tl.load(weights + location + distance, mask=inside, other=0.0)
    after = tl.load(weights + location + 2 * distance, mask=inside, other=0.0)
    of_slope = tl.zeros((UNITS, LANES), tl.float32)
    of_shift = tl.zeros((UNITS, LANES), tl.float32)
    of_after = tl.zeros((UNITS, LANES), tl.float32)
    of_last = tl.zeros((1, LANES), tl.float32)
    for step in range(BLOCK):
        row = block * BLOCK + step
        here = known & (row < rows)
        at = (seed * rows + row).to(tl.int64) * count + column
        value = tl.load(h + at, mask=here, other=0.0).to(tl.float32)[None, :]
        inputs = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)[None, :]
        inner = value * slope + shift
        share, gauss = share_and_gauss(inner, BY_BITS)
        of_last += inputs
        of_after += inputs * inner * share
        down = inputs * after * (share + inner * gauss * 0.3989422804014327)
        of_shift += down
        of_slope += down * value
        if TO_H:
            back = tl.sum(down * slope, 0)
            tl.store(grad_h + at, back.to(grad_h.dtype.element_ty), mask=here)
    line = seed * count + column
    first = sums + block.to(tl.int64) * (3 * distance + tl.num_programs(2) * count)
    at = first + line[None, :] * units + unit[:, None]
    tl.store(at, of_slope, mask=inside)
    tl.store(at + distance, of_shift, mask=inside)
    tl.store(at + 2 * distance, of_after, mask=inside)
    once = known & (tl.program_id(0) % pieces == 0)
    tl.store(first + 3 * distance + line[None, :], of_last, mask=once[None, :])
