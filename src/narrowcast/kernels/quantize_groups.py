"""The Triton kernels of `narrowcast.kernels.fp8_groups`: casts with scales of rows or blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import Launcher, interpreted, launch_kernel
from narrowcast.kernels.quantize import (
    _castable,
    _scale_inv_for,
    _store_columns,
    _store_rows,
    _word,
)

_TILE_ROWS, _TILE_COLUMNS = 128, 64
_BLOCK = 128
_WIDENED = 2048  # elements that one program widens
_SQUARE = 128  # bytes of a tile that is transposed, each way
_BY_BITS = interpreted()
_STRIP = tl.constexpr(8)  # tiles side by side that one program measures


def quantize_groups_into(
    rowwise: Tensor,
    columnwise: Tensor,
    rowwise_scale_inv: Tensor,
    columnwise_scale_inv: Tensor,
    x: Tensor,
    *,
    groups: str,
    largest: float,
    factors: Tensor | None = None,
) -> None:
    """Write `x` in fp8 in both layouts, with inverse scales; an empty layout is skipped."""
    count, width = x.shape
    padded = rowwise.shape[0] if rowwise.numel() else columnwise.shape[-1]
    by_rows, by_columns = bool(rowwise.numel()), bool(columnwise.numel())
    e5m2 = rowwise.dtype == torch.float8_e5m2
    results = (
        rowwise if by_rows else x,
        columnwise if by_columns else x,
        rowwise_scale_inv,
        columnwise_scale_inv,
    )
    if groups != "row":
        rows_stride = rowwise_scale_inv.stride(0) if by_rows else 0
        columns_stride = columnwise_scale_inv.stride(0) if by_columns else 0
        _launch_block(
            (-(-width // _BLOCK), -(-padded // _BLOCK), 1),
            (x, *results),
            (count, width, padded, rows_stride, columns_stride),
            (largest, by_rows, by_columns, groups == "square", _BY_BITS, e5m2, _BLOCK),
            num_warps=8,
        )
        return
    measured = torch.zeros(padded + width, dtype=torch.int32, device=x.device)
    across, down = -(-width // _TILE_COLUMNS), -(-padded // _TILE_ROWS)
    by = x if factors is None else factors  # something to point at
    wanted = by_rows, by_columns, factors is not None
    _launch_largest(
        (-(-across // _STRIP.value), down, 1),
        (x, by, measured),
        (count, width, padded),
        (*wanted, _TILE_ROWS, _TILE_COLUMNS),
        num_warps=8,
    )
    _launch_tile(
        (across, down, 1),
        (x, by, *results, measured),
        (count, width, padded),
        (largest, *wanted, _BY_BITS, e5m2, _TILE_ROWS // 4, _TILE_COLUMNS),
        num_warps=16,  # with 8, half as many fit at once: two casts take registers
    )


def widen_rows_into(result: Tensor, codes: Tensor, scale_inv: Tensor) -> None:
    """Write e4m3 codes times the inverse scale of their row, in the dtype of `result`."""
    rows, width = codes.shape
    launch_kernel(
        _widen_row,
        (rows, triton.cdiv(width, _WIDENED)),
        codes.view(torch.uint8),
        scale_inv,
        result,
        width,
        TILE=_WIDENED,
        num_warps=4,
    )


def transpose_into(result: Tensor, codes: Tensor) -> None:
    """Write a matrix of bytes transposed; torch's own copy reads or writes them one by one."""
    rows, width = codes.shape
    launch_kernel(
        _transpose_tile,
        (triton.cdiv(width, _SQUARE), triton.cdiv(rows, _SQUARE)),
        codes.view(torch.uint8),
        result.view(torch.uint8),
        rows,
        width,
        TILE=_SQUARE,
        num_warps=8,
    )


@triton.jit
def _loaded(x, at, here):
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    return value, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _quantize_block(
    x,
    out_rows,
    out_columns,
    rowwise_scale_inv,
    columnwise_scale_inv,
    count,
    width,
    padded,
    rows_stride,
    columns_stride,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SQUARE: tl.constexpr,
    BY_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rows in fours, whose codes are transposed as one word; see the kernel for whole matrices.
    across, down = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    four = down * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    column = across * BLOCK + tl.arange(0, BLOCK)
    row = four * 4
    within = (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    a, bits_a = _loaded(x, at, (row < count)[:, None] & within)
    b, bits_b = _loaded(x, at + width, (row + 1 < count)[:, None] & within)
    c, bits_c = _loaded(x, at + 2 * width, (row + 2 < count)[:, None] & within)
    d, bits_d = _loaded(x, at + 3 * width, (row + 3 < count)[:, None] & within)
    highest = tl.max(tl.maximum(tl.maximum(bits_a, bits_b), tl.maximum(bits_c, bits_d)), 0)
    if SQUARE:
        one = _scale_inv_for(tl.max(highest, 0), LARGEST)
        word = _word(
            _castable(a, 1.0 / one, LARGEST, BY_BITS),
            _castable(b, 1.0 / one, LARGEST, BY_BITS),
            _castable(c, 1.0 / one, LARGEST, BY_BITS),
            _castable(d, 1.0 / one, LARGEST, BY_BITS),
            E5M2,
            BY_BITS,
        )
        if ROWS:
            tl.store(rowwise_scale_inv + down * rows_stride + across, one)
            _store_rows(out_rows, word, four, column, width, padded)
        if COLUMNS:
            tl.store(columnwise_scale_inv + across * columns_stride + down, one)
            _store_columns(out_columns, word, four, column, width, padded)
    else:
        if ROWS:
            inv_a = _scale_inv_for(tl.max(bits_a, 1), LARGEST)
            inv_b = _scale_inv_for(tl.max(bits_b, 1), LARGEST)
            inv_c = _scale_inv_for(tl.max(bits_c, 1), LARGEST)
            inv_d = _scale_inv_for(tl.max(bits_d, 1), LARGEST)
            word = _word(
                _castable(a, 1.0 / inv_a[:, None], LARGEST, BY_BITS),
                _castable(b, 1.0 / inv_b[:, None], LARGEST, BY_BITS),
                _castable(c, 1.0 / inv_c[:, None], LARGEST, BY_BITS),
                _castable(d, 1.0 / inv_d[:, None], LARGEST, BY_BITS),
                E5M2,
                BY_BITS,
            )
            _store_rows(out_rows, word, four, column, width, padded)
            line = rowwise_scale_inv + across * rows_stride + row
            tl.store(line, inv_a, mask=row < padded)
            tl.store(line + 1, inv_b, mask=row < padded)
            tl.store(line + 2, inv_c, mask=row < padded)
            tl.store(line + 3, inv_d, mask=row < padded)
        if COLUMNS:
            inv = _scale_inv_for(highest, LARGEST)
            word = _word(
                _castable(a, 1.0 / inv[None, :], LARGEST, BY_BITS),
                _castable(b, 1.0 / inv[None, :], LARGEST, BY_BITS),
                _castable(c, 1.0 / inv[None, :], LARGEST, BY_BITS),
                _castable(d, 1.0 / inv[None, :], LARGEST, BY_BITS),
                E5M2,
                BY_BITS,
            )
            _store_columns(out_columns, word, four, column, width, padded)
            tl.store(
                columnwise_scale_inv + down * columns_stride + column, inv, mask=column < width
            )


@triton.jit
def _largest_of_lines(
    x,
    factors,
    measured,
    count,
    width,
    padded,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first = tl.program_id(0).to(tl.int64) * (TILE_COLUMNS * _STRIP)
    of_rows = tl.zeros([TILE_ROWS], dtype=tl.int32)
    for k in tl.static_range(_STRIP):
        column = first + k * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        here = (row < count)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        if FACTORS:
            value *= tl.load(factors + column, mask=column < width, other=0.0)[None, :]
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        of_rows = tl.maximum(of_rows, tl.max(bits, 1))
        if COLUMNS:
            tl.atomic_max(measured + padded + column, tl.max(bits, 0), mask=column < width)
    if ROWS:
        tl.atomic_max(measured + row, of_rows, mask=row < count)


@triton.jit
def _quantize_tile(
    x,
    factors,
    out_rows,
    out_columns,
    rowwise_scale_inv,
    columnwise_scale_inv,
    measured,
    count,
    width,
    padded,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTORS: tl.constexpr,
    BY_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    FOURS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    # Rows in fours, whose codes are transposed as one word; see the kernel for whole matrices.
    four = tl.program_id(1).to(tl.int64) * FOURS + tl.arange(0, FOURS)
    column = tl.program_id(0).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row = four * 4
    within = (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    a, _ = _loaded(x, at, (row < count)[:, None] & within)
    b, _ = _loaded(x, at + width, (row + 1 < count)[:, None] & within)
    c, _ = _loaded(x, at + 2 * width, (row + 2 < count)[:, None] & within)
    d, _ = _loaded(x, at + 3 * width, (row + 3 < count)[:, None] & within)
    if FACTORS:
        by = tl.load(factors + column, mask=column < width, other=0.0)[None, :]
        a *= by
        b *= by
        c *= by
        d *= by
    if ROWS:
        by_a = _row_scale(measured, rowwise_scale_inv, row, padded, LARGEST)
        by_b = _row_scale(measured, rowwise_scale_inv, row + 1, padded, LARGEST)
        by_c = _row_scale(measured, rowwise_scale_inv, row + 2, padded, LARGEST)
        by_d = _row_scale(measured, rowwise_scale_inv, row + 3, padded, LARGEST)
        word = _word(
            _castable(a, by_a, LARGEST, BY_BITS),
            _castable(b, by_b, LARGEST, BY_BITS),
            _castable(c, by_c, LARGEST, BY_BITS),
            _castable(d, by_d, LARGEST, BY_BITS),
            E5M2,
            BY_BITS,
        )
        _store_rows(out_rows, word, four, column, width, padded)
    if COLUMNS:
        inside = column < width
        scale_inv = _scale_inv_for(
            tl.load(measured + padded + column, mask=inside, other=0), LARGEST
        )
        if tl.program_id(1) == 0:
            tl.store(columnwise_scale_inv + column, scale_inv, mask=inside)
        scale = (1.0 / scale_inv)[None, :]
        word = _word(
            _castable(a, scale, LARGEST, BY_BITS),
            _castable(b, scale, LARGEST, BY_BITS),
            _castable(c, scale, LARGEST, BY_BITS),
            _castable(d, scale, LARGEST, BY_BITS),
            E5M2,
            BY_BITS,
        )
        _store_columns(out_columns, word, four, column, width, padded)


@triton.jit
def _row_scale(measured, rowwise_scale_inv, row, padded, LARGEST: tl.constexpr):
    """The scales of some rows, whose inverses the first program of these rows writes down"""
    scale_inv = _scale_inv_for(tl.load(measured + row, mask=row < padded, other=0), LARGEST)
    if tl.program_id(0) == 0:
        tl.store(rowwise_scale_inv + row, scale_inv, mask=row < padded)
    return (1.0 / scale_inv)[:, None]


@triton.jit
def _widen_row(codes, scale_inv, result, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = column < width
    code = tl.load(codes + row * width + column, mask=within, other=0).to(tl.int16)
    # Into the digits of fp16, whose exponent is 8 larger: any GPU can, where casts of e4m3 are new.
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * tl.load(scale_inv + row)
    tl.store(result + row * width + column, value.to(result.dtype.element_ty), mask=within)


@triton.jit
def _transpose_tile(codes, result, rows, width, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = (row < rows)[:, None] & (column < width)[None, :]
    tile = tl.load(codes + row[:, None] * width + column[None, :], mask=here, other=0)
    to = column[:, None] * rows + row[None, :]
    tl.store(result + to, tl.trans(tile), mask=tl.trans(here))


_launch_tile = Launcher(_quantize_tile, views={2: torch.uint8, 3: torch.int32})
_launch_largest = Launcher(_largest_of_lines)
_launch_block = Launcher(_quantize_block, views={1: torch.uint8, 2: torch.int32})
