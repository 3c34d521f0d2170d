"""Kernels of masked sites: the weights of their products, and the operand [ h (m - d) | d x ].

Masks and draws exist in registers only. Draws are seven rounds of Philox (Salmon et al. 2011) on
row, column and stream, under a seed on the device, so a backward pass draws the same numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import launch_kernel

_TILE = 4096  # elements of a program, 32 for each of 128 threads
_WIDEST = 64  # columns of a quarter of a tile: 128 bytes in 16 bits, a whole line of the cache
_BLOCK = 1024  # elements of a program that writes weights


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

    `sources` and `deltas` are kind (0 none, 1 one for all, 2 a tensor, 3 and 4 continuous and
    binomial draws) and value. Columns beyond the components and beyond x are zero.
    """
    cut = _Cut(h, x, importance)
    launch_kernel(
        _operand,
        cut.grid,
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
    needs_operand: bool,
) -> Tensor | None:
    """Overwrite the gradient `down` with d times its second part and the operand's first part.

    The latter only where it is needed. Fills the gradients that are passed, returns that of delta.
    """
    cut = _Cut(h, x, importance)
    shape = (*down.shape[:2], cut.grid[1]) if needs_delta else (0,)
    sums = down.new_empty(shape, dtype=torch.float32)
    shared = grad_source is not None and grad_source.shape[1] == 1
    within = shared and (h.shape[0] == 1 or h.shape[1] % cut.constants["ROWS"] == 0)
    of_source = grad_source
    if shared:
        lines = cut.grid[0] // h.shape[0] if within else h.shape[1]
        shape = (h.shape[0], lines, importance.shape[-1])
        of_source = down.new_empty(shape, dtype=torch.float32)
    launch_kernel(
        _operand_back,
        cut.grid,
        down,
        h,
        h if x is None else x,
        *_mask_arguments(h, importance, source, delta, routed, seed),
        grad_h,
        grad_h if grad_importance is None else grad_importance,
        grad_h if of_source is None else of_source,
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
        SUMMED=within,
        NEEDS_DELTA=needs_delta,
        NEEDS_OPERAND=needs_operand,
        **cut.constants,
    )
    if shared and grad_source is not None and of_source is not None:
        grad_source.copy_(of_source.sum(1, keepdim=True))
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
    """Return tensors and their strides; missing tensors are never read."""
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
def _operand(
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
    left, chosen = _delta_share(
        delta, routed, seed, row, rows, per_seed, delta_value, stream, d_seed, d_row, DELTA, ROUTED
    )
    line = row.to(tl.int64)[:, None]
    padded, d_padded = eighths * 8, d_eighths * 8
    width = padded + d_padded
    part = tl.program_id(1)
    if part < first:
        lane = part * QUARTER + tl.arange(0, QUARTER)
        drawn = _random_bits(seed, row, lane, stream, SOURCE)
        for quarter in tl.static_range(4):
            column = (part * 4 + quarter) * QUARTER + tl.arange(0, QUARTER)
            inside = here[:, None] & (column < count)[None, :]
            at = _places(row, column, per_seed, g_seed, g_row, g_column)
            g = tl.load(importance + at, mask=inside, other=0.0).to(tl.float32)
            s = _share(
                source, drawn[quarter], row, column, inside, per_seed, source_value,
                s_seed, s_row, s_column, SOURCE,
            )  # fmt: skip
            saved = tl.where(chosen[:, None], g + (1.0 - g) * s - left[:, None], 0.0)
            stored = here[:, None] & (column < padded)[None, :]
            act = tl.load(h + line * padded + column[None, :], mask=stored, other=0.0)
            value = (act.to(tl.float32) * saved).to(out.dtype.element_ty)
            tl.store(out + line * width + column[None, :], value, mask=stored)
    else:
        location = (part - first) * 4 * QUARTER + tl.arange(0, 4 * QUARTER)
        known = here[:, None] & (location < d_in)[None, :]
        seen = tl.load(x + line * d_in + location[None, :], mask=known, other=0.0).to(tl.float32)
        seen = (seen * left[:, None]).to(out.dtype.element_ty)
        within = here[:, None] & (location < d_padded)[None, :]
        tl.store(out + line * width + padded + location[None, :], seen, mask=within)


@triton.jit
def _operand_back(
    down, h, x,
    importance, source, delta, routed, seed,
    g_seed, g_row, g_column, s_seed, s_row, s_column, d_seed, d_row,
    grad_h, grad_importance, grad_source, sums,
    rows, per_seed, count, eighths, d_in, d_eighths, first,
    source_value, delta_value, stream,
    SOURCE: tl.constexpr, DELTA: tl.constexpr, ROUTED: tl.constexpr,
    NEEDS_IMPORTANCE: tl.constexpr, NEEDS_SOURCE: tl.constexpr, SUMMED: tl.constexpr,
    NEEDS_DELTA: tl.constexpr, NEEDS_OPERAND: tl.constexpr,
    ROWS: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    left, chosen = _delta_share(
        delta, routed, seed, row, rows, per_seed, delta_value, stream, d_seed, d_row, DELTA, ROUTED
    )
    line = row.to(tl.int64)[:, None]
    padded, d_padded = eighths * 8, d_eighths * 8
    width = padded + d_padded
    part = tl.program_id(1)
    total = tl.zeros((ROWS,), tl.float32)
    if part < first:
        lane = part * QUARTER + tl.arange(0, QUARTER)
        drawn = _random_bits(seed, row, lane, stream, SOURCE)
        for quarter in tl.static_range(4):
            column = (part * 4 + quarter) * QUARTER + tl.arange(0, QUARTER)
            inside = here[:, None] & (column < count)[None, :]
            stored = here[:, None] & (column < padded)[None, :]
            at = _places(row, column, per_seed, g_seed, g_row, g_column)
            g = tl.load(importance + at, mask=inside, other=0.0).to(tl.float32)
            s = _share(
                source, drawn[quarter], row, column, inside, per_seed, source_value,
                s_seed, s_row, s_column, SOURCE,
            )  # fmt: skip
            saved = tl.where(chosen[:, None], g + (1.0 - g) * s - left[:, None], 0.0)
            act = tl.load(h + line * padded + column[None, :], mask=stored, other=0.0)
            act = act.to(tl.float32)
            spot = down + line * width + column[None, :]
            inputs = tl.load(spot, mask=stored, other=0.0).to(tl.float32)
            if NEEDS_OPERAND:
                tl.store(spot, (act * saved).to(down.dtype.element_ty), mask=stored)
            to_h = (inputs * saved).to(grad_h.dtype.element_ty)
            tl.store(grad_h + line * padded + column[None, :], to_h, mask=stored)
            of_mask = tl.where(chosen[:, None], inputs * act, 0.0)
            entry = line * count + column[None, :]
            if NEEDS_IMPORTANCE:
                value = (of_mask * (1.0 - s)).to(grad_importance.dtype.element_ty)
                tl.store(grad_importance + entry, value, mask=inside)
            if NEEDS_SOURCE:
                of_source = of_mask * (1.0 - g)
                if SUMMED:
                    summed = tl.sum(tl.where(inside, of_source, 0.0), 0)
                    row_start = grad_source + tl.program_id(0).to(tl.int64) * count + column
                    tl.store(row_start, summed, mask=column < count)
                else:
                    value = of_source.to(grad_source.dtype.element_ty)
                    tl.store(grad_source + entry, value, mask=inside)
            if NEEDS_DELTA:
                total -= tl.sum(of_mask, 1)
    else:
        position = (part - first) * 4 * QUARTER + tl.arange(0, 4 * QUARTER)
        known = here[:, None] & (position < d_in)[None, :]
        extra = down + line * width + padded + position[None, :]
        of_x = tl.load(extra, mask=known, other=0.0).to(tl.float32)
        tl.store(extra, (of_x * left[:, None]).to(down.dtype.element_ty), mask=known)
        if NEEDS_DELTA:
            seen = tl.load(x + line * d_in + position[None, :], mask=known, other=0.0)
            total += tl.where(chosen, tl.sum(of_x * seen.to(tl.float32), 1), 0.0)
    if NEEDS_DELTA:
        tl.store(sums + row.to(tl.int64) * tl.num_programs(1) + part, total, mask=here)


@triton.jit
def _uniform(bits, BINOMIAL: tl.constexpr):
    """Return a number in [0, 1), or 0 or 1, from 32 random bits."""
    if BINOMIAL:
        return (bits >> 31).to(tl.float32)
    else:
        return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _delta_share(
    delta, routed, seed, row, rows, per_seed, value, stream, d_seed, d_row,
    DELTA: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """Return the mask of the residual per row, and which rows are routed."""
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
def _places(row, column, per_seed, of_seed, of_row, of_column):
    """Return offsets of rows and columns for a tensor of any strides."""
    line = (row // per_seed).to(tl.int64) * of_seed + (row % per_seed).to(tl.int64) * of_row
    return line[:, None] + column[None, :].to(tl.int64) * of_column


@triton.jit
def _share(source, bits, row, column, inside, per_seed, value, s_seed, s_row, s_column,
           SOURCE: tl.constexpr):  # fmt: skip
    """Return the source of each component."""
    if SOURCE == 2:
        at = _places(row, column, per_seed, s_seed, s_row, s_column)
        return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    elif SOURCE >= 3:
        return _uniform(bits, SOURCE == 4)
    else:
        return tl.zeros(inside.shape, tl.float32) + value


@triton.jit
def _random_bits(seed, row, column, stream, SOURCE: tl.constexpr):
    """Return four times 32 random bits per row and column, if there are draws."""
    counter = row[:, None] * 0 + column[None, :]
    if SOURCE >= 3:
        line = row[:, None] + column[None, :] * 0
        return tl.philox(tl.load(seed), counter, line, counter * 0 + stream, counter * 0, 7)
    else:
        return counter, counter, counter, counter


def write_weights(out: Tensor, V: Tensor, U: Tensor, weight_t: Tensor | None, padded: int) -> None:
    """Fill each seed's line of `out` with V, (d_in, padded), then [U ; W^T], padded by zeros."""
    seeds, d_in, count = V.shape
    other = U if weight_t is None else weight_t.expand(seeds, -1, -1)
    size = out.shape[1]
    launch_kernel(
        _weights,
        (triton.cdiv(size, _BLOCK), seeds),
        out,
        V,
        U,
        other,
        *V.stride(),
        *U.stride(),
        *other.stride(),
        size,
        d_in,
        count,
        padded,
        U.shape[2],
        STACKED=weight_t is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _weights(
    out, V, U, other,
    v_seed, v_line, v_column, u_seed, u_line, u_column, o_seed, o_line, o_column,
    size, d_in, count, padded, d_out,
    STACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    location = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.program_id(1).to(tl.int64)
    here = location < size
    first = location < d_in * padded
    line, column = location // padded, location % padded
    at = seed * v_seed + line.to(tl.int64) * v_line + column.to(tl.int64) * v_column
    value = tl.load(V + at, mask=first & (column < count), other=0.0).to(tl.float32)
    after = location - d_in * padded
    line, column = after // d_out, (after % d_out).to(tl.int64)
    own = here & (after >= 0)
    at = seed * u_seed + line.to(tl.int64) * u_line + column * u_column
    value += tl.load(U + at, mask=own & (line < count), other=0.0).to(tl.float32)
    if STACKED:
        line = line - padded
        at = seed * o_seed + line.to(tl.int64) * o_line + column * o_column
        inside = own & (line >= 0) & (line < d_in)
        value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + seed * size + location, value.to(out.dtype.element_ty), mask=here)
