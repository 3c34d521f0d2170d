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

from narrowcast.kernels.fp8 import LARGEST, Quantized, castable, scale_inv_for
from narrowcast.kernels.launch import unsupported_reason

BLOCK = 128


def quantize_blocks(
    x: Tensor,
    target: torch.dtype,
    *,
    square: bool = False,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Quantized:
    """Return a matrix whose width is a multiple of 128 in fp8; an unwanted layout is empty.

    What is not finite becomes NaN.
    """
    compiling = torch.compiler.is_compiling()
    call = torch.ops.narrowcast.quantize_fp8_blocks if compiling else _quantize
    return Quantized(*call(x, target, square, rowwise, columnwise))


def _empty(
    x: Tensor, target: torch.dtype, square: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, width = x.shape
    padded = count + -count % BLOCK
    down, across = padded // BLOCK, width // BLOCK
    by_rows = (down, across + -across % 4) if square else (across, padded)
    by_columns = (across, down + -down % 4) if square else (down, width)
    return (
        x.new_empty((padded, width) if rowwise else (0,), dtype=target),
        x.new_empty((width, padded) if columnwise else (0,), dtype=target),
        x.new_empty(by_rows if rowwise else (0,), dtype=torch.float32),
        x.new_empty(by_columns if columnwise else (0,), dtype=torch.float32),
    )


def _quantize(
    x: Tensor, target: torch.dtype, square: bool, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    results = _empty(x, target, square, rowwise, columnwise)
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
    rowwise: Tensor,
    columnwise: Tensor,
    rowwise_scale_inv: Tensor,
    columnwise_scale_inv: Tensor,
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
        one = scale_inv_for(tiles.abs().amax((1, 3)), largest)
        codes = castable(tiles, one[:, None, :, None], largest).view(value.shape)
        if rowwise.numel():
            rowwise.copy_(codes)
            rowwise_scale_inv[:, : one.shape[1]].copy_(one)
        if columnwise.numel():
            columnwise.copy_(codes.t())
            columnwise_scale_inv[:, : one.shape[0]].copy_(one.t())
        return
    if rowwise.numel():
        scale_inv = scale_inv_for(tiles.abs().amax(3), largest)  # (down, 128, across)
        rowwise.copy_(castable(tiles, scale_inv[..., None], largest).view(value.shape))
        rowwise_scale_inv.copy_(scale_inv.view(-1, width // BLOCK).t())
    if columnwise.numel():
        scale_inv = scale_inv_for(tiles.abs().amax(1), largest)  # (down, across, 128)
        columnwise.copy_(castable(tiles, scale_inv[:, None], largest).view(value.shape).t())
        columnwise_scale_inv.copy_(scale_inv.view(-1, width))


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "quantize_fp8_blocks(Tensor x, ScalarType target, bool square, bool rowwise, bool columnwise) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)
_library.impl("quantize_fp8_blocks", _quantize, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::quantize_fp8_blocks", _empty)
