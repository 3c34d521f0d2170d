"""What multiplies a site's weights, [ h (m - d) | d x ], in one pass over memory; and back.

Forward, h, importance and x are read once and the operand is written once, in whole lines that a
matrix product can read aligned; masks and draws exist in registers alone. Backward, the gradient of
the operand is read and the operand written in its place, since the product for dU wants it again.

Draws are counters put through a cipher (Philox: Salmon et al. 2011, whose seven rounds pass every
test of theirs) under a seed read from the device. The counter of a number is its row, its column,
and a stream by which several sites share a seed; so a backward pass draws what the forward pass
drew, and two numbers are never one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NONE, VALUE, GIVEN, CONTINUOUS, BINOMIAL = range(5)
"""Where numbers come from: nowhere, one for all, a tensor, or draws."""

_TILE = 4096  # elements of a program, 32 for each of 128 threads
_WIDEST = 64  # columns of a quarter of a tile: 128 bytes in 16 bits, a whole line of the cache


def write_operand(
    out: Tensor,
    h: Tensor,
    x: Tensor | None,
    importance: Tensor,
    source: Tensor | None,
    delta: Tensor | None,
    routed: Tensor | None,
    seed: Tensor | None,
    *,
    sources: tuple[int, float],
    deltas: tuple[int, float],
    stream: int,
) -> None:
    """Fill `out`, (seeds, rows, width), from h, (seeds, rows, C or more), and the mask.

    `sources` and `deltas` are kind and value of each; tensors broadcast to (seeds, rows, C) and
    (seeds, rows). Columns beyond the components and beyond x are zero.
    """
    cut = _Cut(h, x, importance)
    _write[cut.grid](
        out,
        h,
        h if x is None else x,
        *_mask_arguments(h, importance, source, delta, routed, seed),
        *cut.sizes,
        sources[1],
        deltas[1],
        stream,
        SOURCE=sources[0],
        DELTA=deltas[0],
        ROUTED=routed is not None,
        **cut.constants,
    )


def write_gradients(
    down: Tensor,
    h: Tensor,
    x: Tensor | None,
    importance: Tensor,
    source: Tensor | None,
    delta: Tensor | None,
    routed: Tensor | None,
    seed: Tensor | None,
    *,
    sources: tuple[int, float],
    deltas: tuple[int, float],
    stream: int,
    grad_h: Tensor,
    grad_importance: Tensor | None,
    grad_source: Tensor | None,
    needs_delta: bool,
) -> Tensor | None:
    """Make of the operand's gradient `down` the operand's first part, and d times its second.

    Fills the gradients that are given, of whole shapes; returns that of delta where it is needed.
    """
    cut = _Cut(h, x, importance)
    sums = down.new_empty((*down.shape[:2], cut.grid[1]), dtype=torch.float32)
    _back[cut.grid](
        down,
        h,
        h if x is None else x,
        *_mask_arguments(h, importance, source, delta, routed, seed),
        grad_h,
        grad_h if grad_importance is None else grad_importance,
        grad_h if grad_source is None else grad_source,
        sums,
        *cut.sizes,
        sources[1],
        deltas[1],
        stream,
        SOURCE=sources[0],
        DELTA=deltas[0],
        ROUTED=routed is not None,
        NEEDS_IMPORTANCE=grad_importance is not None,
        NEEDS_SOURCE=grad_source is not None,
        NEEDS_DELTA=needs_delta,
        **cut.constants,
    )
    return sums.sum(-1) if needs_delta else None


class _Cut:
    """How many rows and columns programs take; the same forward and back, since draws go by it."""

    def __init__(self, h: Tensor, x: Tensor | None, importance: Tensor) -> None:
        seeds, rows, padded = h.shape
        count = importance.shape[-1]
        quarter = min(max(triton.next_power_of_2(triton.cdiv(padded, 4)), 8), _WIDEST)
        together = _TILE // (4 * quarter)
        first = triton.cdiv(padded, 4 * quarter)
        d_in = 0 if x is None else x.shape[-1]
        d_padded = -(-d_in // 8) * 8
        second = triton.cdiv(d_padded, 4 * quarter)
        self.grid = (triton.cdiv(seeds * rows, together), first + second)
        # Given as eighths, widths show the compiler that lines begin at multiples of 8.
        self.sizes = (seeds * rows, rows, count, padded // 8, d_in, d_padded // 8, first)
        self.constants = {"ROWS": together, "QUARTER": quarter, "num_warps": 4}


def _mask_arguments(
    h: Tensor,
    importance: Tensor,
    source: Tensor | None,
    delta: Tensor | None,
    routed: Tensor | None,
    seed: Tensor | None,
) -> tuple[object, ...]:
    """Return tensors and how far apart their numbers are; what is not there is never read."""
    seeds, rows, _ = h.shape
    whole = importance if source is None else source.expand(importance.shape)
    lines = h[..., 0] if delta is None else delta.expand(seeds, rows)
    return (
        importance,
        whole,
        lines,
        h if routed is None else routed.view(torch.uint8),
        h if seed is None else seed,
        *importance.stride(),
        *whole.stride(),
        *lines.stride(),
    )


@triton.jit
def _uniform(bits, BINOMIAL: tl.constexpr):
    """A number of [0, 1), or 0 or 1, from 32 random bits."""
    if BINOMIAL:
        return (bits >> 31).to(tl.float32)
    else:
        return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _delta_of(
    delta, routed, seed, row, rows, per_seed, value, stream, d_seed, d_row,
    DELTA: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """By how much what components leave takes part in each row, and which rows they compute."""
    here = row < rows
    left = tl.zeros_like(row).to(tl.float32)
    if DELTA == 1:
        left += value
    elif DELTA == 2:
        at = (row // per_seed).to(tl.int64) * d_seed + (row % per_seed).to(tl.int64) * d_row
        left += tl.load(delta + at, mask=here, other=0.0).to(tl.float32)
    elif DELTA >= 3:
        zero = row * 0
        bits, _, _, _ = tl.philox(tl.load(seed), zero, row, zero + stream, zero + 1, 7)
        left += _uniform(bits, DELTA == 4)
    chosen = here
    if ROUTED:
        chosen = here & (tl.load(routed + row, mask=here, other=0) != 0)
        left = tl.where(chosen, left, 1.0)
    return left, chosen


@triton.jit
def _share(source, bits, row, column, inside, per_seed, value, s_seed, s_row, s_column,
           SOURCE: tl.constexpr):  # fmt: skip
    """By how much what is not important takes part."""
    if SOURCE == 2:
        at = (row // per_seed).to(tl.int64) * s_seed + (row % per_seed).to(tl.int64) * s_row
        at = at[:, None] + column[None, :].to(tl.int64) * s_column
        return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    elif SOURCE >= 3:
        return _uniform(bits, SOURCE == 4)
    else:
        return tl.zeros(inside.shape, tl.float32) + value


@triton.jit
def _bits(seed, row, column, stream, SOURCE: tl.constexpr):
    """Four times 32 bits for each row and column, where draws are wanted."""
    counter = row[:, None] * 0 + column[None, :]
    if SOURCE >= 3:
        line = row[:, None] + column[None, :] * 0
        return tl.philox(tl.load(seed), counter, line, counter * 0 + stream, counter * 0, 7)
    else:
        return counter, counter, counter, counter


@triton.jit
def _importance_at(importance, row, column, inside, per_seed, g_seed, g_row, g_column):
    at = (row // per_seed).to(tl.int64) * g_seed + (row % per_seed).to(tl.int64) * g_row
    at = at[:, None] + column[None, :].to(tl.int64) * g_column
    return tl.load(importance + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(
    out, h, x,
    importance, source, delta, routed, seed,
    g_seed, g_row, g_column, s_seed, s_row, s_column, d_seed, d_row,
    rows, per_seed, count, eighths, d_in, d_eighths, first,
    source_value, delta_value, stream,
    SOURCE: tl.constexpr, DELTA: tl.constexpr, ROUTED: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    left, chosen = _delta_of(
        delta, routed, seed, row, rows, per_seed, delta_value, stream, d_seed, d_row, DELTA, ROUTED
    )
    line = row.to(tl.int64)[:, None]
    padded, d_padded = eighths * 8, d_eighths * 8
    width = padded + d_padded
    part = tl.program_id(1)
    if part < first:
        lane = part * QUARTER + tl.arange(0, QUARTER)
        drawn = _bits(seed, row, lane, stream, SOURCE)
        for quarter in tl.static_range(4):
            column = (part * 4 + quarter) * QUARTER + tl.arange(0, QUARTER)
            inside = here[:, None] & (column < count)[None, :]
            g = _importance_at(importance, row, column, inside, per_seed, g_seed, g_row, g_column)
            s = _share(
                source, drawn[quarter], row, column, inside, per_seed, source_value,
                s_seed, s_row, s_column, SOURCE,
            )  # fmt: skip
            kept = tl.where(chosen[:, None], g + (1.0 - g) * s - left[:, None], 0.0)
            stored = here[:, None] & (column < padded)[None, :]
            act = tl.load(h + line * padded + column[None, :], mask=stored, other=0.0)
            value = (act.to(tl.float32) * kept).to(out.dtype.element_ty)
            tl.store(out + line * width + column[None, :], value, mask=stored)
    else:
        place = (part - first) * 4 * QUARTER + tl.arange(0, 4 * QUARTER)
        known = here[:, None] & (place < d_in)[None, :]
        seen = tl.load(x + line * d_in + place[None, :], mask=known, other=0.0).to(tl.float32)
        seen = (seen * left[:, None]).to(out.dtype.element_ty)
        within = here[:, None] & (place < d_padded)[None, :]
        tl.store(out + line * width + padded + place[None, :], seen, mask=within)


@triton.jit
def _back(
    down, h, x,
    importance, source, delta, routed, seed,
    g_seed, g_row, g_column, s_seed, s_row, s_column, d_seed, d_row,
    grad_h, grad_importance, grad_source, sums,
    rows, per_seed, count, eighths, d_in, d_eighths, first,
    source_value, delta_value, stream,
    SOURCE: tl.constexpr, DELTA: tl.constexpr, ROUTED: tl.constexpr,
    NEEDS_IMPORTANCE: tl.constexpr, NEEDS_SOURCE: tl.constexpr, NEEDS_DELTA: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    left, chosen = _delta_of(
        delta, routed, seed, row, rows, per_seed, delta_value, stream, d_seed, d_row, DELTA, ROUTED
    )
    line = row.to(tl.int64)[:, None]
    padded, d_padded = eighths * 8, d_eighths * 8
    width = padded + d_padded
    part = tl.program_id(1)
    total = tl.zeros((ROWS,), tl.float32)
    if part < first:
        lane = part * QUARTER + tl.arange(0, QUARTER)
        drawn = _bits(seed, row, lane, stream, SOURCE)
        for quarter in tl.static_range(4):
            column = (part * 4 + quarter) * QUARTER + tl.arange(0, QUARTER)
            inside = here[:, None] & (column < count)[None, :]
            stored = here[:, None] & (column < padded)[None, :]
            g = _importance_at(importance, row, column, inside, per_seed, g_seed, g_row, g_column)
            s = _share(
                source, drawn[quarter], row, column, inside, per_seed, source_value,
                s_seed, s_row, s_column, SOURCE,
            )  # fmt: skip
            kept = tl.where(chosen[:, None], g + (1.0 - g) * s - left[:, None], 0.0)
            act = tl.load(h + line * padded + column[None, :], mask=stored, other=0.0)
            act = act.to(tl.float32)
            at = down + line * width + column[None, :]
            given = tl.load(at, mask=stored, other=0.0).to(tl.float32)
            tl.store(at, (act * kept).to(down.dtype.element_ty), mask=stored)
            to_h = (given * kept).to(grad_h.dtype.element_ty)
            tl.store(grad_h + line * padded + column[None, :], to_h, mask=stored)
            of_mask = tl.where(chosen[:, None], given * act, 0.0)
            entry = line * count + column[None, :]
            if NEEDS_IMPORTANCE:
                value = (of_mask * (1.0 - s)).to(grad_importance.dtype.element_ty)
                tl.store(grad_importance + entry, value, mask=inside)
            if NEEDS_SOURCE:
                value = (of_mask * (1.0 - g)).to(grad_source.dtype.element_ty)
                tl.store(grad_source + entry, value, mask=inside)
            if NEEDS_DELTA:
                total -= tl.sum(of_mask, 1)
    else:
        place = (part - first) * 4 * QUARTER + tl.arange(0, 4 * QUARTER)
        known = here[:, None] & (place < d_in)[None, :]
        beside = down + line * width + padded + place[None, :]
        of_x = tl.load(beside, mask=known, other=0.0).to(tl.float32)
        tl.store(beside, (of_x * left[:, None]).to(down.dtype.element_ty), mask=known)
        if NEEDS_DELTA:
            seen = tl.load(x + line * d_in + place[None, :], mask=known, other=0.0)
            total += tl.where(chosen, tl.sum(of_x * seen.to(tl.float32), 1), 0.0)
    if NEEDS_DELTA:
        tl.store(sums + row.to(tl.int64) * tl.num_programs(1) + part, total, mask=here)
