"""Kernels of importances: small MLPs that predict them, squashing, and means of their powers.

The MLPs map one number to one, all in fp32, and their hidden layer is never in memory. For the
gradients of weights a thread holds a component's units in registers and goes through rows; sums of
row blocks are added in a fixed order. Squashing in torch takes seven launches, and sixteen back.
"""

from collections.abc import Sequence

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
_SQUASHED = 1024  # elements of a program that squashes
_SUMMED_ROWS = 64
_SUMMED_COLUMNS = 64  # columns of a tile: 32 elements for each of 128 threads


def mlp_forward(h: Tensor, weights: Tensor, last: Tensor) -> Tensor:
    """Return the outputs of `h`; `weights` are w1, b1, w2 as (3, seeds, units, components)."""
    out = torch.empty_like(h)
    _through_units(h, h, weights, last, out, back=False)
    return out


def mlp_backward(grad: Tensor, h: Tensor, weights: Tensor, *, to_h: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of h, empty unless `to_h`, and of w1, b1, w2, b2 one after another."""
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


def squash(logits: Tensor, leak: float) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper importances of contiguous `logits`, in their format."""
    low, up = torch.empty_like(logits), torch.empty_like(logits)
    size = logits.numel()
    launch_kernel(
        _squash,
        (triton.cdiv(size, _SQUASHED),),
        logits,
        low,
        up,
        size,
        leak,
        BLOCK=_SQUASHED,
        num_warps=4,
    )
    return low, up


def squash_back(
    logits: Tensor, grad_low: Tensor | None, grad_up: Tensor | None, leak: float
) -> Tensor:
    """Return the gradient of the logits; a missing gradient is not read."""
    grad = torch.empty_like(logits)
    size = logits.numel()
    launch_kernel(
        _squash_back,
        (triton.cdiv(size, _SQUASHED),),
        logits,
        logits if grad_low is None else grad_low,
        logits if grad_up is None else grad_up,
        grad,
        size,
        leak,
        LOW=grad_low is not None,
        UP=grad_up is not None,
        BLOCK=_SQUASHED,
        num_warps=4,
    )
    return grad


@triton.jit
def _squash(logits, low, up, size, leak, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    z = tl.load(logits + at, mask=here, other=0.0).to(tl.float32)
    within = tl.where(z <= 0.0, 0.0, tl.where(z > 1.0, 1.0, z))
    tl.store(low + at, within.to(low.dtype.element_ty), mask=here)
    above = tl.where(z > 1.0, 1.0 + leak * (z - 1.0), within)
    tl.store(up + at, above.to(up.dtype.element_ty), mask=here)


@triton.jit
def _squash_back(
    logits, grad_low, grad_up, grad, size, leak,
    LOW: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    z = tl.load(logits + at, mask=here, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if LOW:
        inputs = tl.load(grad_low + at, mask=here, other=0.0).to(tl.float32)
        below = leak * tl.where(inputs > 0.0, 0.0, inputs)
        total += tl.where(z <= 0.0, below, tl.where(z > 1.0, 0.0, inputs))
    if UP:
        inputs = tl.load(grad_up + at, mask=here, other=0.0).to(tl.float32)
        total += tl.where(z > 1.0, leak * inputs, tl.where(z < 0.0, 0.0, inputs))
    tl.store(grad + at, total.to(grad.dtype.element_ty), mask=here)


def power_means(uppers: Sequence[Tensor], power: float | Tensor, epsilon: float) -> Tensor:
    """Return the means of (max(u, 0) + epsilon)^power, (seeds, components of all sites)."""
    seeds, rows, _ = uppers[0].shape
    blocks = triton.cdiv(rows, _SUMMED_ROWS)
    width = sum(each.shape[-1] for each in uppers)
    sums = torch.empty((blocks, seeds, width), device=uppers[0].device)
    first = 0
    for upper in uppers:
        launch_kernel(
            _sum, _grid(upper),
            upper, *_power(upper, power), sums, first, width, *_sizes(upper, epsilon),
            **_constants(upper, power),
        )  # fmt: skip
        first += upper.shape[-1]
    return sums.sum(0)


def power_means_back(
    grad: Tensor, uppers: Sequence[Tensor], power: float | Tensor, epsilon: float
) -> list[Tensor]:
    """Return the gradients of all sites from that of the means, of any strides."""
    result, first = [], 0
    for upper in uppers:
        out = torch.empty_like(upper)
        launch_kernel(
            _sum_back, _grid(upper),
            upper, *_power(upper, power), grad, out, first, *grad.stride(),
            *_sizes(upper, epsilon), **_constants(upper, power),
        )  # fmt: skip
        result.append(out)
        first += upper.shape[-1]
    return result


def _width(upper: Tensor) -> int:
    return int(min(max(triton.next_power_of_2(upper.shape[-1]), 16), _SUMMED_COLUMNS))


def _grid(upper: Tensor) -> tuple[int, int, int]:
    seeds, rows, count = upper.shape
    return triton.cdiv(count, _width(upper)), triton.cdiv(rows, _SUMMED_ROWS), seeds


def _power(upper: Tensor, power: float | Tensor) -> tuple[Tensor, float]:
    """Return a pointer to the power and its value; one of them is read."""
    return (power, 0.0) if isinstance(power, Tensor) else (upper, power)


def _sizes(upper: Tensor, epsilon: float) -> tuple[float, int, int, float]:
    _, rows, count = upper.shape
    return 1.0 / rows, rows, count, epsilon


def _constants(upper: Tensor, power: float | Tensor) -> dict[str, int]:
    kind = 0 if isinstance(power, Tensor) else {1.0: 1, 2.0: 2}.get(power, 3)
    return {"POWER": kind, "ROWS": _SUMMED_ROWS, "COLUMNS": _width(upper), "num_warps": 4}


@triton.jit
def _sum(
    upper, powers, power, sums, first, width, share, rows, count, epsilon,
    POWER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, here, at = _places(rows, count, ROWS, COLUMNS)
    u = tl.load(upper + at, mask=here, other=0.0).to(tl.float32)
    x = tl.where(u < 0.0, 0.0, u) + epsilon
    if POWER == 1:
        value = x
    elif POWER == 2:
        value = x * x
    else:
        value = tl.exp2(_exponent(powers, power, POWER) * tl.log2(x))
    total = tl.sum(tl.where(here, value, 0.0), 0) * share
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    tl.store(sums + line * width + first + column, total, mask=column < count)


@triton.jit
def _sum_back(
    upper, powers, power, grad, out, first, g_seed, g_column, share, rows, count, epsilon,
    POWER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, here, at = _places(rows, count, ROWS, COLUMNS)
    u = tl.load(upper + at, mask=here, other=0.0).to(tl.float32)
    spot = grad + tl.program_id(2).to(tl.int64) * g_seed + (first + column).to(tl.int64) * g_column
    inputs = tl.load(spot, mask=column < count, other=0.0).to(tl.float32) * share
    if POWER == 1:
        slope = tl.full((ROWS, COLUMNS), 1.0, tl.float32)
    elif POWER == 2:
        slope = 2.0 * (u + epsilon)
    else:
        p = _exponent(powers, power, POWER)
        slope = p * tl.exp2((p - 1.0) * tl.log2(tl.where(u < 0.0, 0.0, u) + epsilon))
        slope = tl.where(u == 0.0, tl.where(p < 1.0, 0.0, slope), slope)
    value = tl.where(u < 0.0, 0.0, slope * inputs[None, :])
    tl.store(out + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _places(rows, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the columns of a program, a mask of its elements, and their offsets."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = (row < rows)[:, None] & (column < count)[None, :]
    line = tl.program_id(2).to(tl.int64) * rows + row.to(tl.int64)
    return column, here, line[:, None] * count + column[None, :]


@triton.jit
def _exponent(powers, power, POWER: tl.constexpr):
    if POWER == 0:
        return tl.load(powers).to(tl.float32)
    else:
        return power
