"""Widen an e4m3 matrix with a scale for each row in one pass: reads a byte, writes two or four.

Torch would cast, and then read and write what it cast once more to scale it. The digits of e4m3 are
laid into those of fp16, whose exponent is 8 larger, so any GPU can do it, and Triton's interpreter.
Codes of NaN are not known here: a weight that is kept has none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements of a program


def widen_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes (rows, columns) times the fp32 scale of their row, rounded once to `dtype`."""
    rows, columns = codes.shape
    result = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    if codes.numel():
        grid = (rows, triton.cdiv(columns, _TILE))
        _widen[grid](codes.view(torch.uint8), scale, result, columns, TILE=_TILE, num_warps=4)
    return result


@triton.jit
def _widen(codes, scale, result, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = column < columns
    code = tl.load(codes + row * columns + column, mask=here, other=0).to(tl.int16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = value * tl.load(scale + row)
    tl.store(result + row * columns + column, value.to(result.dtype.element_ty), mask=here)
