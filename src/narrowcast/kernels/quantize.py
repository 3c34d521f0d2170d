"""The Triton kernels of `narrowcast.kernels.fp8`: scale, cast and transpose in one read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.gelu_arithmetic import activated
from narrowcast.kernels.launch import Launcher, interpreted

# Rows, columns and warps of a program: the best of six to fourteen, measured on an H200 over
# matrices of 16384 × 4096 and 16384 × 16384; and the registers of a thread, which else go to
# counting, for which few programs stop.
_TILES = {"": (128, 64, 8, 64), "gelu": (64, 64, 4, 56), "gelu_backward": (64, 64, 4, 64)}
# Of those with two tensors to read, as the last of these.
_TILES |= dict.fromkeys(("gated_silu", "gated_gelu", "gated_gelu_tanh"), _TILES["gelu_backward"])
_BLOCK = 16384
# One tile in so many, and no power of two: tiles at the same tokens of each sequence would be.
_COUNTED = tl.constexpr(7)
_BY_BITS = interpreted()  # whose own casts to fp8 are wrong


def _assembly(name: str) -> tl.constexpr:
    """Return the instructions that cast four floats and pack the codes into a word.

    In one piece: ptxas of Triton 3.6 reads an unwritten register if codes are also used singly.
    """
    return tl.constexpr(
        f"""
        {{
        .reg .b16 low, high;
        cvt.rn.satfinite.{name}x2.f32 low, $2, $1;
        cvt.rn.satfinite.{name}x2.f32 high, $4, $3;
        mov.b32 $0, {{low, high}};
        }}
        """
    )


_TO_E4M3, _TO_E5M2 = _assembly("e4m3"), _assembly("e5m2")


def quantize_into(
    rowwise: Tensor,
    columnwise: Tensor,
    x: Tensor,
    *,
    scale_inv: Tensor,
    cast_stats: Tensor | None,
    measured: Tensor | None,
    largest: float,
    activation: str,
    second: Tensor | None,
) -> None:
    """Write `x` in fp8 into `rowwise` and, transposed, into `columnwise`; an empty one is skipped.

    With `measured`, the bits of the largest magnitude, `scale_inv` is written; else it is read.
    """
    count, width = x.shape
    target = rowwise.dtype
    padded = rowwise.shape[0] if rowwise.numel() else columnwise.shape[-1]
    in_rows, in_columns = bool(rowwise.numel()), bool(columnwise.numel())
    counted = cast_stats is not None
    tile_rows, tile_columns, warps, registers = _TILES[activation]
    _launch_tile(
        (-(-width // tile_columns), -(-padded // tile_rows), 1),
        (
            x,
            x if second is None else second,
            rowwise if in_rows else x,
            columnwise if in_columns else x,
            scale_inv,
            scale_inv if measured is None else measured,
            scale_inv if cast_stats is None else cast_stats,
        ),
        (count, width, padded),
        (
            largest,
            measured is None,
            measured is None and counted,
            counted,
            in_rows,
            in_columns,
            activation,
            _BY_BITS,
            target == torch.float8_e5m2,
            tile_rows // 4,
            tile_columns,
        ),
        num_warps=warps,
        maxnreg=registers,
    )


def largest_magnitude(x: Tensor, *, activation: str = "", second: Tensor | None = None) -> Tensor:
    """Return the bits of the largest magnitude as one int32; a NaN counts as larger than all."""
    seen = torch.zeros(1, dtype=torch.int32, device=x.device)
    if x.numel():
        _launch_largest(
            (-(-x.numel() // _BLOCK), 1, 1),
            (x, x if second is None else second, seen),
            (x.numel(),),
            (activation, _BY_BITS, _BLOCK),
            num_warps=8,
        )
    return seen


@triton.jit
def _largest_magnitude(
    x, second, seen, count, ACTIVATION: tl.constexpr, BY_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    location = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + location, mask=location < count, other=0.0).to(tl.float32)
    other = value
    if ACTIVATION != "" and ACTIVATION != "gelu":
        other = tl.load(second + location, mask=location < count, other=0.0).to(tl.float32)
    value = activated(value, other, ACTIVATION, BY_BITS)
    tl.atomic_max(seen, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))


@triton.jit
def _scale_inv_for(bits, LARGEST: tl.constexpr):
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
    second,
    position,
    inside,
    scale,
    LARGEST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Some elements, scaled and ready to be cast, and their magnitudes before that"""
    value = tl.load(x + position, mask=inside, other=0.0).to(tl.float32)
    other = value
    if ACTIVATION != "" and ACTIVATION != "gelu":
        other = tl.load(second + position, mask=inside, other=0.0).to(tl.float32)
    value = activated(value, other, ACTIVATION, BY_BITS)
    return _castable(value, scale, LARGEST, BY_BITS), tl.abs(value)


@triton.jit
def _castable(value, scale, LARGEST: tl.constexpr, BY_BITS: tl.constexpr):
    """Values scaled; saturated, where the cast does not do so; NaN where they are not finite"""
    # Saturating must not hide what is not finite.
    if BY_BITS:
        saved = tl.minimum(tl.maximum(value * scale, -LARGEST), LARGEST)
        return tl.where(tl.abs(value) < float("inf"), saved, float("nan"))
    else:
        return value * scale + value * 0.0  # zero times what is not finite is NaN


@triton.jit
def _larger(a, b):
    """The larger of two magnitudes; NaN is larger than all"""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _word(a, b, c, d, E5M2: tl.constexpr, BY_BITS: tl.constexpr):
    """The fp8 codes of four values, the first in the lowest byte"""
    if BY_BITS:
        low = _fp8_bits(a, E5M2).to(tl.uint32) | (_fp8_bits(b, E5M2).to(tl.uint32) << 8)
        high = _fp8_bits(c, E5M2).to(tl.uint32) | (_fp8_bits(d, E5M2).to(tl.uint32) << 8)
        return low | (high << 16)
    elif E5M2:
        return _four_codes(a, b, c, d, _TO_E5M2)
    else:
        return _four_codes(a, b, c, d, _TO_E4M3)


@triton.jit
def _four_codes(a, b, c, d, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,f,f,f,f", [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _store_rows(out, word, four, column, width, padded):
    """Write the codes of rows in fours as they are"""
    row = four * 4
    at = row[:, None] * width + column[None, :]
    stored = (row < padded)[:, None] & (column < width)[None, :]  # all four or none: it is of 16
    for k in tl.static_range(4):
        code = ((word >> (8 * k)) & 0xFF).to(tl.uint8)
        tl.store(out + at + k * width, code, mask=stored)


@triton.jit
def _store_columns(out, word, four, column, width, padded):
    """Write the codes of rows in fours transposed, a word at a time"""
    turned = column[:, None] * (padded // 4) + four[None, :]
    stored = (column < width)[:, None] & (four * 4 < padded)[None, :]
    tl.store(out + turned, tl.trans(word).to(tl.int32, bitcast=True), mask=stored)


@triton.jit
def _count(
    x,
    second,
    cast_stats,
    at,
    row,
    count,
    width,
    within,
    scale_inv,
    LARGEST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Count values that were sampled, saturated and flushed to zero.

    It reads them from the cache again: keeping them in registers made every tile slower.
    """
    # What is at most half of the smallest value rounds to zero. As bits of magnitudes.
    half: tl.constexpr = 2.0**-10 if LARGEST == 448.0 else 2.0**-17
    high = (scale_inv * LARGEST).to(tl.int32, bitcast=True)
    low = (scale_inv * half).to(tl.int32, bitcast=True)
    lost = tl.zeros(at.shape, dtype=tl.int32)  # saturated above bit 16, flushed below
    for k in range(4):  # not unrolled: the fewer registers, the more programs at once
        here = (row + k < count)[:, None] & within
        value = tl.load(x + at + k * width, mask=here, other=0.0).to(tl.float32)
        other = value
        if ACTIVATION != "" and ACTIVATION != "gelu":
            other = tl.load(second + at + k * width, mask=here, other=0.0).to(tl.float32)
        value = activated(value, other, ACTIVATION, BY_BITS)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        lost += ((bits > high) & (bits < 0x7F800000)).to(tl.int32) << 16
        lost += ((bits > 0) & (bits <= low)).to(tl.int32)
    rows = tl.sum((row < count).to(tl.int32) + (row + 1 < count), 0)
    rows += tl.sum((row + 2 < count).to(tl.int32) + (row + 3 < count), 0)
    looked = rows * tl.sum(tl.sum(within.to(tl.int32), 1), 0)
    # A program has at most 8,192 values.
    lost = tl.sum(tl.sum(lost, 1), 0)
    tl.atomic_add(cast_stats + 1, looked)
    tl.atomic_add(cast_stats + 2, lost >> 16, mask=lost > 0xFFFF)  # most have nothing to add
    tl.atomic_add(cast_stats + 3, lost & 0xFFFF, mask=(lost & 0xFFFF) > 0)


@triton.jit
def _quantize_tile(
    x,
    second,
    out_rows,
    out_columns,
    scale_inv,
    measured,
    cast_stats,
    count,
    width,
    padded,
    LARGEST: tl.constexpr,
    FIXED: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT: tl.constexpr,
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
        inv = tl.load(scale_inv)
    else:
        inv = _scale_inv_for(tl.load(measured), LARGEST)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_inv, inv)
    scale = 1.0 / inv
    row = four * 4
    at = row[:, None] * width + column[None, :]
    here = (row < count)[:, None] & within
    a, largest = _scaled(x, second, at, here, scale, LARGEST, ACTIVATION, BY_BITS)
    here = (row + 1 < count)[:, None] & within
    b, size = _scaled(x, second, at + width, here, scale, LARGEST, ACTIVATION, BY_BITS)
    largest = _larger(largest, size)
    here = (row + 2 < count)[:, None] & within
    c, size = _scaled(x, second, at + 2 * width, here, scale, LARGEST, ACTIVATION, BY_BITS)
    largest = _larger(largest, size)
    here = (row + 3 < count)[:, None] & within
    d, size = _scaled(x, second, at + 3 * width, here, scale, LARGEST, ACTIVATION, BY_BITS)
    largest = _larger(largest, size)
    word = _word(a, b, c, d, E5M2, BY_BITS)
    if ROWS:
        _store_rows(out_rows, word, four, column, width, padded)
    if COLUMNS:
        _store_columns(out_columns, word, four, column, width, padded)
    if RECORD:
        bits = largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(cast_stats, tl.max(tl.max(bits, 1), 0))
    # On diagonals, so that every row and every column of tiles has its share.
    if COUNT and (tl.program_id(0) + tl.program_id(1)) % _COUNTED == 0:
        _count(
            x, second, cast_stats, at, row, count, width, within, inv, LARGEST, ACTIVATION, BY_BITS
        )


_launch_tile = Launcher(_quantize_tile, views={2: torch.uint8, 3: torch.int32})
_launch_largest = Launcher(_largest_magnitude)
