"""The Triton kernels of `narrowcast.kernels.fp8`: scale, cast and transpose in one read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import interpreted

# Rows, columns and warps of a program: the best of four to fourteen, measured on an H200 over
# matrices of 16384 × 4096 and 16384 × 16384.
_TILES = {"": (128, 64, 8), "gelu": (64, 64, 4), "gelu_backward": (64, 64, 4)}
_BLOCK = 16384


def quantize_into(
    rows: Tensor,
    columns: Tensor,
    x: Tensor,
    *,
    inverse: Tensor,
    seen: Tensor | None,
    measured: Tensor | None,
    largest: float,
    activation: str,
    beside: Tensor | None,
) -> None:
    """Write `x` in fp8 into `rows` and, transposed, into `columns`; an empty one is left out.

    With `measured`, the bits of the largest magnitude, the scale is made from it and its inverse
    written; without it `inverse` is read, and the largest magnitude goes into `seen`.
    """
    count, width = x.shape
    target = rows.dtype
    padded = rows.shape[0] if rows.numel() else columns.shape[-1]
    exact = interpreted()  # its own casts to fp8 are wrong
    tile_rows, tile_columns, warps = _TILES[activation]
    _quantize_tile[(triton.cdiv(width, tile_columns), triton.cdiv(padded, tile_rows))](
        x,
        x if beside is None else beside,
        rows.view(torch.uint8),
        columns.view(torch.int32),
        inverse,
        measured if measured is not None else seen if seen is not None else inverse,
        count,
        width,
        padded,
        LARGEST=largest,
        FIXED=measured is None,
        RECORD=measured is None and seen is not None,
        ROWS=bool(rows.numel()),
        COLUMNS=bool(columns.numel()),
        ACTIVATION=activation,
        BY_BITS=exact,
        E5M2=target == torch.float8_e5m2,
        FOURS=tile_rows // 4,
        TILE_COLUMNS=tile_columns,
        num_warps=warps,
    )


def largest_magnitude(x: Tensor, *, activation: str = "", beside: Tensor | None = None) -> Tensor:
    """Return the bits of the largest magnitude as one int32; a NaN counts as larger than all."""
    seen = torch.zeros(1, dtype=torch.int32, device=x.device)
    if x.numel():
        _largest_magnitude[(triton.cdiv(x.numel(), _BLOCK),)](
            x,
            x if beside is None else beside,
            seen,
            x.numel(),
            ACTIVATION=activation,
            BY_BITS=interpreted(),
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return seen


@triton.jit
def _share_and_gauss(x, BY_BITS: tl.constexpr):
    """The share of a normal distribution below x, and exp(-x²/2); each to about 1e-7

    By Abramowitz and Stegun 7.1.26 and the GPU's own reciprocal and power: a third of the
    instructions that libdevice's erf takes. Both arguments are where these need no care.
    """
    below = 1.0 + 0.2316418882663604 * tl.abs(x)
    exponent = x * x * -0.7213475204444817
    if BY_BITS:
        t = 1.0 / below
        gauss = tl.exp2(exponent)
    else:
        t = _instruction(below, "rcp.approx.ftz.f32 $0, $1;")
        gauss = _instruction(exponent, "ex2.approx.ftz.f32 $0, $1;")
    poly = 0.127414796 + t * (
        -0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    )
    tail = poly * t * gauss
    return tl.where(x < 0, tail, 1.0 - tail), gauss


@triton.jit
def _instruction(x, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(ASSEMBLY, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _activated(x, other, ACTIVATION: tl.constexpr, BY_BITS: tl.constexpr):
    if ACTIVATION == "gelu":
        share, gauss = _share_and_gauss(x, BY_BITS)
        return x * share
    elif ACTIVATION == "gelu_backward":
        share, gauss = _share_and_gauss(other, BY_BITS)
        return x * (share + other * gauss * 0.3989422804014327)
    else:
        return x


@triton.jit
def _largest_magnitude(
    x, beside, seen, count, ACTIVATION: tl.constexpr, BY_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    other = value
    if ACTIVATION == "gelu_backward":
        other = tl.load(beside + place, mask=place < count, other=0.0).to(tl.float32)
    value = _activated(value, other, ACTIVATION, BY_BITS)
    tl.atomic_max(seen, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))


@triton.jit
def _inverse_for(bits, LARGEST: tl.constexpr):
    """The inverse of the largest power of two by which `bits` stays within LARGEST, as floats"""
    # Both formats end at 1.75 · 2ⁿ. As exponents, where a division would round.
    top: tl.constexpr = 8 if LARGEST == 448.0 else 15
    exponent = top + 127 + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    usable = (bits > 0) & (bits < 0x7F800000)
    return tl.where(usable, (254 - exponent) << 23, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_bits(x, E5M2: tl.constexpr):
    """Round to nearest even by integer arithmetic; x is NaN or within the format's range"""
    mantissa: tl.constexpr = 2 if E5M2 else 3
    bias: tl.constexpr = 15 if E5M2 else 7
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = ((bits >> 24) & 0x80).to(tl.int32)
    shift: tl.constexpr = 23 - mantissa
    even = (magnitude >> shift) & 1
    normal = ((magnitude + (1 << (shift - 1)) - 1 + even) >> shift) - ((127 - bias) << mantissa)
    # Adding 1.5 · 2²³ leaves a multiple of one, and so of the smallest value.
    step: tl.constexpr = 2.0 ** (bias - 1 + mantissa)
    little = tl.where(magnitude < 0x3F800000, magnitude, 0).to(tl.float32, bitcast=True)
    small = (little * step + 12582912.0) - 12582912.0
    code = tl.where(magnitude < ((128 - bias) << 23), small.to(tl.int32), normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def _scaled(
    x,
    beside,
    place,
    inside,
    scale,
    LARGEST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Some elements, scaled and saturated, and the bits of their magnitudes before that"""
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    other = value
    if ACTIVATION == "gelu_backward":
        other = tl.load(beside + place, mask=inside, other=0.0).to(tl.float32)
    value = _activated(value, other, ACTIVATION, BY_BITS)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    kept = tl.minimum(tl.maximum(value * scale, -LARGEST), LARGEST)
    # Saturating must not hide what is not finite.
    return tl.where(bits < 0x7F800000, kept, float("nan")), bits


@triton.jit
def _word(a, b, c, d, E5M2: tl.constexpr, BY_BITS: tl.constexpr):
    """The fp8 codes of four values, the first in the lowest byte"""
    if BY_BITS:
        low = _fp8_bits(a, E5M2).to(tl.uint32) | (_fp8_bits(b, E5M2).to(tl.uint32) << 8)
        high = _fp8_bits(c, E5M2).to(tl.uint32) | (_fp8_bits(d, E5M2).to(tl.uint32) << 8)
        return low | (high << 16)
    # As one piece of assembly: where codes are used both singly and packed into words, the ptxas
    # that comes with Triton 3.6 reads a register it has never written.
    elif E5M2:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _quantize_tile(
    x,
    beside,
    out_rows,
    out_columns,
    inverse,
    seen,
    count,
    width,
    padded,
    LARGEST: tl.constexpr,
    FIXED: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
    E5M2: tl.constexpr,
    FOURS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    # Rows in fours, whose codes are transposed as one word: a quarter of the way through shared
    # memory that bytes would take one by one.
    four = tl.program_id(1).to(tl.int64) * FOURS + tl.arange(0, FOURS)
    column = tl.program_id(0).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    within = (column < width)[None, :]
    if FIXED:
        inv = tl.load(inverse)
    else:
        inv = _inverse_for(tl.load(seen), LARGEST)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse, inv)
    scale = 1.0 / inv
    row = four * 4
    at = row[:, None] * width + column[None, :]
    here = (row < count)[:, None] & within
    a, largest = _scaled(x, beside, at, here, scale, LARGEST, ACTIVATION, BY_BITS)
    here = (row + 1 < count)[:, None] & within
    b, bits = _scaled(x, beside, at + width, here, scale, LARGEST, ACTIVATION, BY_BITS)
    largest = tl.maximum(largest, bits)
    here = (row + 2 < count)[:, None] & within
    c, bits = _scaled(x, beside, at + 2 * width, here, scale, LARGEST, ACTIVATION, BY_BITS)
    largest = tl.maximum(largest, bits)
    here = (row + 3 < count)[:, None] & within
    d, bits = _scaled(x, beside, at + 3 * width, here, scale, LARGEST, ACTIVATION, BY_BITS)
    largest = tl.maximum(largest, bits)
    word = _word(a, b, c, d, E5M2, BY_BITS)
    if ROWS:
        stored = (row < padded)[:, None] & within  # a multiple of 16: all four or none
        for k in tl.static_range(4):
            code = ((word >> (8 * k)) & 0xFF).to(tl.uint8)
            tl.store(out_rows + at + k * width, code, mask=stored)
    if COLUMNS:
        turned = column[:, None] * (padded // 4) + four[None, :]
        stored = (column < width)[:, None] & (row < padded)[None, :]
        tl.store(out_columns + turned, tl.trans(word).to(tl.int32, bitcast=True), mask=stored)
    if RECORD:
        tl.atomic_max(seen, tl.max(tl.max(largest, 1), 0))
