"""The Triton kernels of `narrowcast.kernels.gating.fp8_back`: both gradients in one read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.gelu_arithmetic import share_and_slope
from narrowcast.kernels.launch import Launcher, interpreted
from narrowcast.kernels.quantize import (
    _COUNTED,
    _castable,
    _larger,
    _scale_inv_for,
    _store_columns,
    _store_rows,
    _word,
)

# Rows, columns and warps of a program: half a tile of the kernel that casts one matrix, a thread.
_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 64, 8
_BLOCK = 4096
_BY_BITS = interpreted()

Pair = tuple[Tensor, Tensor]


def back_into(
    rowwise: Pair,
    columnwise: Pair,
    read: tuple[Tensor, Tensor, Tensor],
    *,
    scale_inv: Pair,
    cast_stats: tuple[Tensor | None, Tensor | None],
    by_itself: tuple[bool, bool],
    largest: float,
    activation: str,
) -> None:
    """Write the gradients of gate and value in both layouts; an empty layout is skipped."""
    grad, gate, value = read
    count, width = gate.shape
    padded = rowwise[0].shape[0] if rowwise[0].numel() else columnwise[0].shape[-1]
    if not (rowwise[0].numel() or columnwise[0].numel()):
        padded = count
    measured = torch.zeros(2, dtype=torch.int32, device=grad.device) if any(by_itself) else None
    if measured is not None:
        _launch_largest(
            (-(-grad.numel() // _BLOCK), 1, 1),
            (grad, gate, value, measured),
            (grad.numel(),),
            (activation, _BY_BITS, _BLOCK),
            num_warps=8,
        )
        for i, (own, noted) in enumerate(zip(by_itself, cast_stats, strict=True)):
            if own and noted is not None:
                torch.maximum(noted[:1], measured[i : i + 1], out=noted[:1])
    counts = [scale_inv[i] if noted is None else noted for i, noted in enumerate(cast_stats)]
    in_rows, in_columns = bool(rowwise[0].numel()), bool(columnwise[0].numel())
    codes = [
        layout if layout.numel() else grad
        for both in zip(rowwise, columnwise, strict=True)
        for layout in both
    ]
    _launch_tile(
        (-(-width // _TILE_COLUMNS), -(-padded // _TILE_ROWS), 1),
        (
            grad,
            gate,
            value,
            *codes,
            *scale_inv,
            scale_inv[0] if measured is None else measured,
            *counts,
        ),
        (count, width, padded),
        (
            largest,
            not by_itself[0],
            not by_itself[1],
            cast_stats[0] is not None,
            cast_stats[1] is not None,
            in_rows,
            in_columns,
            activation,
            _BY_BITS,
            rowwise[0].dtype == torch.float8_e5m2,
            _TILE_ROWS // 4,
            _TILE_COLUMNS,
        ),
        num_warps=_WARPS,
    )


@triton.jit
def _both(grad, gate, value, location, here, ACTIVATION: tl.constexpr, BY_BITS: tl.constexpr):
    down = tl.load(grad + location, mask=here, other=0.0).to(tl.float32)
    a = tl.load(gate + location, mask=here, other=0.0).to(tl.float32)
    b = tl.load(value + location, mask=here, other=0.0).to(tl.float32)
    share, slope = share_and_slope(a, ACTIVATION, BY_BITS)
    return down * b * slope, down * a * share


@triton.jit
def _largest_of_both(
    grad,
    gate,
    value,
    seen,
    count,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    of_gate, of_value = _both(grad, gate, value, position, position < count, ACTIVATION, BY_BITS)
    tl.atomic_max(seen, tl.max(of_gate.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    tl.atomic_max(seen + 1, tl.max(of_value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))


@triton.jit
def _inverse(scale_inv, measured, first, LARGEST: tl.constexpr, FIXED: tl.constexpr):
    """The inverse scale in force, which is written where the matrix decides it"""
    if FIXED:
        inv = tl.load(scale_inv)
    else:
        inv = _scale_inv_for(tl.load(measured), LARGEST)
        if first:
            tl.store(scale_inv, inv)
    return inv


@triton.jit
def _lost(value, inv, LARGEST: tl.constexpr):
    """One above bit 16 where a value saturates, one below where it is flushed to zero"""
    # What is at most half of the smallest value rounds to zero. As bits of magnitudes.
    half: tl.constexpr = 2.0**-10 if LARGEST == 448.0 else 2.0**-17
    high = (inv * LARGEST).to(tl.int32, bitcast=True)
    low = (inv * half).to(tl.int32, bitcast=True)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    saturated = ((bits > high) & (bits < 0x7F800000)).to(tl.int32) << 16
    return saturated + ((bits > 0) & (bits <= low)).to(tl.int32)


@triton.jit
def _count_both(
    grad,
    gate,
    value,
    gate_stats,
    value_stats,
    at,
    row,
    count,
    width,
    within,
    gate_inv,
    value_inv,
    LARGEST: tl.constexpr,
    COUNT_GATE: tl.constexpr,
    COUNT_VALUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Add to the stats how many values were looked at, saturated and flushed to zero"""
    of_gate = tl.zeros(at.shape, dtype=tl.int32)  # saturated above bit 16, flushed below
    of_value = tl.zeros(at.shape, dtype=tl.int32)
    for k in range(4):
        here = (row + k < count)[:, None] & within
        a, b = _both(grad, gate, value, at + k * width, here, ACTIVATION, BY_BITS)
        of_gate += _lost(a, gate_inv, LARGEST)
        of_value += _lost(b, value_inv, LARGEST)
    rows = tl.sum((row < count).to(tl.int32) + (row + 1 < count), 0)
    rows += tl.sum((row + 2 < count).to(tl.int32) + (row + 3 < count), 0)
    looked = rows * tl.sum(tl.sum(within.to(tl.int32), 1), 0)
    if COUNT_GATE:
        lost = tl.sum(tl.sum(of_gate, 1), 0)
        tl.atomic_add(gate_stats + 1, looked)
        tl.atomic_add(gate_stats + 2, lost >> 16, mask=lost > 0xFFFF)
        tl.atomic_add(gate_stats + 3, lost & 0xFFFF, mask=(lost & 0xFFFF) > 0)
    if COUNT_VALUE:
        lost = tl.sum(tl.sum(of_value, 1), 0)
        tl.atomic_add(value_stats + 1, looked)
        tl.atomic_add(value_stats + 2, lost >> 16, mask=lost > 0xFFFF)
        tl.atomic_add(value_stats + 3, lost & 0xFFFF, mask=(lost & 0xFFFF) > 0)


@triton.jit
def _record(stats, a, b, c, d):
    """Take the largest magnitude of four parts into the first of the stats"""
    most = _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(c), tl.abs(d)))
    bits = most.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(stats, tl.max(tl.max(bits, 1), 0))


@triton.jit
def _write(
    a,
    b,
    c,
    d,
    inv,
    out_rows,
    out_columns,
    four,
    column,
    width,
    padded,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_BITS: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Scale, cast and write the values of rows in fours"""
    scale = 1.0 / inv
    codes = _word(
        _castable(a, scale, LARGEST, BY_BITS),
        _castable(b, scale, LARGEST, BY_BITS),
        _castable(c, scale, LARGEST, BY_BITS),
        _castable(d, scale, LARGEST, BY_BITS),
        E5M2,
        BY_BITS,
    )
    if ROWS:
        _store_rows(out_rows, codes, four, column, width, padded)
    if COLUMNS:
        _store_columns(out_columns, codes, four, column, width, padded)


@triton.jit
def _back_tile(
    grad,
    gate,
    value,
    gate_rows,
    gate_columns,
    value_rows,
    value_columns,
    gate_scale_inv,
    value_scale_inv,
    measured,
    gate_stats,
    value_stats,
    count,
    width,
    padded,
    LARGEST: tl.constexpr,
    FIXED_GATE: tl.constexpr,
    FIXED_VALUE: tl.constexpr,
    COUNT_GATE: tl.constexpr,
    COUNT_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    FOURS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    four = tl.program_id(1).to(tl.int64) * FOURS + tl.arange(0, FOURS)
    column = tl.program_id(0).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    within = (column < width)[None, :]
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    gate_inv = _inverse(gate_scale_inv, measured, first, LARGEST, FIXED_GATE)
    value_inv = _inverse(value_scale_inv, measured + 1, first, LARGEST, FIXED_VALUE)
    row = four * 4
    at = row[:, None] * width + column[None, :]
    here = (row < count)[:, None] & within
    ga, va = _both(grad, gate, value, at, here, ACTIVATION, BY_BITS)
    here = (row + 1 < count)[:, None] & within
    gb, vb = _both(grad, gate, value, at + width, here, ACTIVATION, BY_BITS)
    here = (row + 2 < count)[:, None] & within
    gc, vc = _both(grad, gate, value, at + 2 * width, here, ACTIVATION, BY_BITS)
    here = (row + 3 < count)[:, None] & within
    gd, vd = _both(grad, gate, value, at + 3 * width, here, ACTIVATION, BY_BITS)
    _write(
        ga, gb, gc, gd, gate_inv, gate_rows, gate_columns, four, column, width, padded,
        LARGEST, ROWS, COLUMNS, BY_BITS, E5M2,
    )  # fmt: skip
    _write(
        va, vb, vc, vd, value_inv, value_rows, value_columns, four, column, width, padded,
        LARGEST, ROWS, COLUMNS, BY_BITS, E5M2,
    )  # fmt: skip
    if COUNT_GATE and FIXED_GATE:
        _record(gate_stats, ga, gb, gc, gd)
    if COUNT_VALUE and FIXED_VALUE:
        _record(value_stats, va, vb, vc, vd)
    # On diagonals, so that every row and every column of tiles has its share.
    if (COUNT_GATE or COUNT_VALUE) and (tl.program_id(0) + tl.program_id(1)) % _COUNTED == 0:
        _count_both(
            grad, gate, value, gate_stats, value_stats, at, row, count, width, within,
            gate_inv, value_inv, LARGEST, COUNT_GATE, COUNT_VALUE, ACTIVATION, BY_BITS,
        )  # fmt: skip


_launch_tile = Launcher(
    _back_tile, views={3: torch.uint8, 4: torch.int32, 5: torch.uint8, 6: torch.int32}
)
_launch_largest = Launcher(_largest_of_both)
