"""The Triton kernel of `narrowcast.kernels.fp8_blocks`: one read, a scale for each block of 128."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import Launcher, interpreted
from narrowcast.kernels.quantize import (
    _castable,
    _scale_inv_for,
    _store_columns,
    _store_rows,
    _word,
)

BLOCK = 128
_BY_BITS = interpreted()


def quantize_blocks_into(
    rowwise: Tensor,
    columnwise: Tensor,
    rowwise_scale_inv: Tensor,
    columnwise_scale_inv: Tensor,
    x: Tensor,
    *,
    largest: float,
    square: bool,
) -> None:
    """Write `x` in fp8 as it is and transposed, with the inverse scales of either.

    An empty result is left out. `square`: one scale for 128 × 128 values, the same for both.
    """
    count, width = x.shape
    padded = rowwise.shape[0] if rowwise.numel() else columnwise.shape[-1]
    in_rows, in_columns = bool(rowwise.numel()), bool(columnwise.numel())
    _launch(
        (-(-width // BLOCK), -(-padded // BLOCK), 1),
        (
            x,
            rowwise if in_rows else x,
            columnwise if in_columns else x,
            rowwise_scale_inv,
            columnwise_scale_inv,
        ),
        (
            count,
            width,
            padded,
            rowwise_scale_inv.stride(0) if in_rows else 0,
            columnwise_scale_inv.stride(0) if in_columns else 0,
        ),
        (
            largest,
            in_rows,
            in_columns,
            square,
            _BY_BITS,
            rowwise.dtype == torch.float8_e5m2,
            BLOCK,
        ),
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


_launch = Launcher(_quantize_block, views={1: torch.uint8, 2: torch.int32})
