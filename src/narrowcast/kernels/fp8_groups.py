"""Cast a matrix to fp8 with one scale per row or per block of 128, and widen e4m3 rows back.

Scales belong to the summed dimension, so the two layouts have different scales and codes. Rows are
padded with zeros to a multiple of 16, blocks to 128. Scales lie as cuBLAS reads them: (blocks,
rows) for 1 × 128, and (blocks of rows, blocks of columns) for 128 × 128, each line padded to a
multiple of four.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.kernels.fp8 import LARGEST, MULTIPLE, Quantized, castable, scale_inv_for
from narrowcast.kernels.launch import unsupported_reason

BLOCK = 128


def quantize_groups(
    x: Tensor,
    target: torch.dtype,
    groups: str,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    factors: Tensor | None = None,
) -> Quantized:
    """Return a matrix in fp8 with scales by `groups`. Blocks need a width that 128 divides."""
    compiling = torch.compiler.is_compiling()
    call = torch.ops.narrowcast.quantize_fp8_groups if compiling else _quantize
    return Quantized(*call(x, target, groups, rowwise, columnwise, factors))


def widen_rows(
    codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, *, again: bool = False
) -> Tensor:
    """Return e4m3 codes times the inverse scale of their row or block, rounded once to `dtype`.

    A matrix of inverse scales has one per 128×128 block. `again` marks the backward pass: a
    compiler would merge two equal calls and keep the result. Codes of NaN are not supported, and
    inverse scales of rows are at most 2¹¹⁹.
    """
    compiling = torch.compiler.is_compiling()
    call = torch.ops.narrowcast.widen_fp8_rows if compiling else _widen
    result: Tensor = call(codes, scale_inv, dtype, again)
    return result


def transposed_bytes(codes: Tensor) -> Tensor:
    """Return a matrix of bytes transposed, each row of it in one piece."""
    if torch.compiler.is_compiling() or unsupported_reason(codes.device) or not codes.numel():
        return codes.t().contiguous()
    from narrowcast.kernels.quantize_groups import transpose_into

    result = codes.new_empty((codes.shape[1], codes.shape[0]))
    transpose_into(result, codes.contiguous())
    return result


def _empty(
    x: Tensor,
    target: torch.dtype,
    groups: str,
    rowwise: bool,
    columnwise: bool,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, width = x.shape
    padded = count + -count % (MULTIPLE if groups == "row" else BLOCK)
    down, across = padded // BLOCK, width // BLOCK
    by_rows: tuple[int, ...] = (padded,)
    by_columns: tuple[int, ...] = (width,)
    if groups == "block":
        by_rows, by_columns = (across, padded), (down, width)
    elif groups == "square":
        by_rows, by_columns = (down, across + -across % 4), (across, down + -down % 4)
    return (
        x.new_empty((padded, width) if rowwise else (0,), dtype=target),
        x.new_empty((width, padded) if columnwise else (0,), dtype=target),
        x.new_empty(by_rows if rowwise else (0,), dtype=torch.float32),
        x.new_empty(by_columns if columnwise else (0,), dtype=torch.float32),
    )


def _quantize(
    x: Tensor,
    target: torch.dtype,
    groups: str,
    rowwise: bool,
    columnwise: bool,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    results = _empty(x, target, groups, rowwise, columnwise)
    if groups == "square" or not x.numel():
        for scales in results[2:]:
            scales.fill_(1)  # what fills a line of squares up is read, and multiplies nothing
    if not x.numel():
        return results
    if unsupported_reason(x.device):
        _plainly(x, *results, groups=groups, largest=LARGEST[target], factors=factors)
    else:
        from narrowcast.kernels.quantize_groups import quantize_groups_into

        quantize_groups_into(*results, x, groups=groups, largest=LARGEST[target], factors=factors)
    return results


def _plainly(
    x: Tensor,
    rowwise: Tensor,
    columnwise: Tensor,
    rowwise_scale_inv: Tensor,
    columnwise_scale_inv: Tensor,
    *,
    groups: str,
    largest: float,
    factors: Tensor | None = None,
) -> None:
    """Do as the kernels do, in a pass for each operation."""
    width = x.shape[1]
    padded = rowwise.shape[0] if rowwise.numel() else columnwise.shape[-1]
    value = x.float() if factors is None else x.float() * factors
    value = F.pad(value, (0, 0, 0, padded - x.shape[0]))
    if groups == "row":
        magnitude = value.abs()
        if rowwise.numel():
            rowwise_scale_inv.copy_(scale_inv_for(magnitude.amax(1), largest))
            rowwise.copy_(castable(value, rowwise_scale_inv[:, None], largest))
        if columnwise.numel():
            columnwise_scale_inv.copy_(scale_inv_for(magnitude.amax(0), largest))
            columnwise.copy_(castable(value, columnwise_scale_inv, largest).t())
        return
    tiles = value.view(-1, BLOCK, width // BLOCK, BLOCK)  # (down, 128, across, 128)
    if groups == "square":
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


def _widen(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    if scale_inv.dim() == 2:
        return _widen_blocks(codes, scale_inv, dtype)
    if unsupported_reason(codes.device) or codes.is_meta:
        return _widen_plainly(codes, scale_inv, dtype)
    from narrowcast.kernels.quantize_groups import widen_rows_into

    result = codes.new_empty(codes.shape, dtype=dtype)
    if codes.numel():
        widen_rows_into(result, codes.contiguous(), scale_inv.contiguous())
    return result


def _widen_plainly(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Do as the kernel does; on a CPU in a tenth of the time that torch's own cast takes."""
    # The digits of e4m3 laid into those of fp16, whose exponent is 8 larger: sign, a gap, the rest.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    wide = bits.view(torch.float16).to(torch.float32)
    return wide.mul_((256.0 * scale_inv)[:, None]).to(dtype)


def _widen_blocks(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32, one row of blocks at a time: scales of a file are no powers of two."""
    rows, width = codes.shape
    result = codes.new_empty(codes.shape, dtype=dtype)
    across = scale_inv.repeat_interleave(BLOCK, 1)[:, :width]  # (down, width)
    for block, first in enumerate(range(0, rows, BLOCK)):
        part = slice(first, first + BLOCK)
        result[part] = codes[part].float() * across[block]
    return result


def _empty_wide(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


_library = torch.library.Library("narrowcast", "FRAGMENT")
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_library.define(
    "quantize_fp8_groups(Tensor x, ScalarType target, str groups, bool rowwise, bool columnwise, "
    "Tensor? factors=None) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_library.impl("quantize_fp8_groups", _quantize, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::quantize_fp8_groups", _empty)
_library.define(
    "widen_fp8_rows(Tensor codes, Tensor scale_inv, ScalarType dtype, bool again) -> Tensor",
    tags=_TAGS,
)
_library.impl("widen_fp8_rows", _widen, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::widen_fp8_rows", _empty_wide)
