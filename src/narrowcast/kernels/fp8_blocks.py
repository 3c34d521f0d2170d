"""Cast a matrix to fp8 with a scale for each block of 128, in one read of it.

A block is 128 values along the dimension that is summed, or 128 × 128 of a weight, so its scale is
made from what the program has just read: no pass before it, no history, and an outlier spoils 128
values. As it is and transposed a matrix has different blocks, and so different codes. Rows are
filled up with zeros to a multiple of 128. The scales lie as cuBLAS reads them: (blocks, rows) for
blocks of 1 × 128, and for 128 × 128 (blocks of rows, blocks of columns), each line filled up to a
multiple of four. Inside `torch.compile` this is the operator
`narrowcast::quantize_fp8_blocks`.
"""

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import LARGEST, LocallyQuantized, castable, inverse_for
from narrowcast.kernels.launch import unsupported_reason

BLOCK = 128


def quantize_blocks(
    x: Tensor, target: torch.dtype, *, square: bool = False, rows: bool = True, columns: bool = True
) -> LocallyQuantized:
    """Return a matrix whose width is a multiple of 128 in fp8; an unwanted layout is empty.

    What is not finite becomes NaN.
    """
    compiling = torch.compiler.is_compiling()
    call = torch.ops.narrowcast.quantize_fp8_blocks if compiling else _quantize
    return LocallyQuantized(*call(x, target, square, rows, columns))


def _empty(
    x: Tensor, target: torch.dtype, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, width = x.shape
    padded = count + -count % BLOCK
    down, across = padded // BLOCK, width // BLOCK
    by_rows = (down, across + -across % 4) if square else (across, padded)
    by_columns = (across, down + -down % 4) if square else (down, width)
    return (
        x.new_empty((padded, width) if rows else (0,), dtype=target),
        x.new_empty((width, padded) if columns else (0,), dtype=target),
        x.new_empty(by_rows if rows else (0,), dtype=torch.float32),
        x.new_empty(by_columns if columns else (0,), dtype=torch.float32),
    )


def _quantize(
    x: Tensor, target: torch.dtype, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    results = _empty(x, target, square, rows, columns)
    for scales in results[2:]:
        if square and scales.numel():
            scales.fill_(1)  # what fills a line up is read, and multiplies nothing
    if not x.numel():
        return results
    if unsupported_reason(x.device):
        _plainly(x, *results, largest=LARGEST[target], square=square)
    else:
        from narrowcast.kernels.quantize_blocks import quantize_blocks_into

        quantize_blocks_into(*results, x, largest=LARGEST[target], square=square)
    return results


def _plainly(
    x: Tensor,
    rows: Tensor,
    columns: Tensor,
    rows_inverse: Tensor,
    columns_inverse: Tensor,
    *,
    largest: float,
    square: bool,
) -> None:
    """Do as the kernel does, in a pass for each operation."""
    count, width = x.shape
    missing = -count % BLOCK
    value = torch.nn.functional.pad(x.float(), (0, 0, 0, missing))
    tiles = value.view(-1, BLOCK, width // BLOCK, BLOCK)  # (down, 128, across, 128)
    if square:
        one = inverse_for(tiles.abs().amax((1, 3)), largest)
        codes = castable(tiles, one[:, None, :, None], largest).view(value.shape)
        if rows.numel():
            rows.copy_(codes)
            rows_inverse[:, : one.shape[1]].copy_(one)
        if columns.numel():
            columns.copy_(codes.t())
            columns_inverse[:, : one.shape[0]].copy_(one.t())
        return
    if rows.numel():
        inverse = inverse_for(tiles.abs().amax(3), largest)  # (down, 128, across)
        rows.copy_(castable(tiles, inverse[..., None], largest).view(value.shape))
        rows_inverse.copy_(inverse.view(-1, width // BLOCK).t())
    if columns.numel():
        inverse = inverse_for(tiles.abs().amax(1), largest)  # (down, across, 128)
        columns.copy_(castable(tiles, inverse[:, None], largest).view(value.shape).t())
        columns_inverse.copy_(inverse.view(-1, width))


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "quantize_fp8_blocks(Tensor x, ScalarType target, bool square, bool rows, bool columns) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)
_library.impl("quantize_fp8_blocks", _quantize, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::quantize_fp8_blocks", _empty)
