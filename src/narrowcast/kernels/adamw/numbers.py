"""Rounding and 8-bit moments of the fused optimizer, written to take few instructions.

On a GPU, one instruction packs or unpacks two or four values of a word. Elsewhere (`NATIVE` is
false) the same is plain arithmetic.
"""

import triton
import triton.language as tl

from narrowcast.kernels.adamw.twin import HEADROOM, MULTIPLIERS, SMALLEST_SCALE
from narrowcast.kernels.instruction import instruction

# 2²³ and a small integer: the last byte is that integer. Casts are four times as slow as additions.
ZERO = tl.constexpr(8388608.0)


@triton.jit
def plus_zero(byte, FLIPPED: tl.constexpr, NATIVE: tl.constexpr):
    """Return ZERO plus a byte with some bits flipped: ZERO's bits, and the byte as the last."""
    byte = byte.to(tl.uint8, bitcast=True)
    if NATIVE:
        result = tl.inline_asm_elementwise(
            """
            { .reg .b32 word;
            xor.b32 word, $4, $5;
            prmt.b32 $0, word, 0x4B000000, 0x7650;
            prmt.b32 $1, word, 0x4B000000, 0x7651;
            prmt.b32 $2, word, 0x4B000000, 0x7652;
            prmt.b32 $3, word, 0x4B000000, 0x7653; }
            """,
            "=f,=f,=f,=f,r,r",
            [byte, tl.full([1, 1], FLIPPED, tl.uint8)],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        result = ((byte ^ FLIPPED).to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return result


@triton.jit
def last_bytes(word, NATIVE: tl.constexpr):
    """Return the last byte of each word."""
    if NATIVE:
        result = tl.inline_asm_elementwise(
            """
            { .reg .b32 front, back;
            prmt.b32 front, $1, $2, 0x0040;
            prmt.b32 back, $3, $4, 0x0040;
            prmt.b32 $0, front, back, 0x5410; }
            """,
            "=r,r,r,r,r",
            [word],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        result = word.to(tl.uint8)
    return result


@triton.jit
def signed_bytes(word, like, NATIVE: tl.constexpr):
    """Return the last byte of each word, at most 127, with the sign of a float."""
    if NATIVE:
        result = tl.inline_asm_elementwise(
            """
            { .reg .b32 front, back, codes, signs, plus, minus;
            prmt.b32 front, $1, $2, 0x0040;
            prmt.b32 back, $3, $4, 0x0040;
            prmt.b32 codes, front, back, 0x5410;
            prmt.b32 front, $5, $6, 0x00FB;
            prmt.b32 back, $7, $8, 0x00FB;
            prmt.b32 signs, front, back, 0x5410;
            lop3.b32 plus, codes, signs, 0x80808080, 0xBA;
            and.b32 minus, codes, signs;
            sub.u32 plus, plus, minus;
            xor.b32 $0, plus, 0x80808080; }
            """,
            "=r,r,r,r,r,r,r,r,r",
            [word, like.to(tl.int32, bitcast=True)],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        sign = like.to(tl.int32, bitcast=True) >> 31
        result = ((word ^ sign) - sign).to(tl.int8)
    return result


@triton.jit
def joined(high, low, NATIVE: tl.constexpr):
    """Return the float of a high half plus a signed low half. A zero high half counts alone."""
    if NATIVE:
        result = tl.inline_asm_elementwise(
            """
            { .reg .b32 zero, some, low;
            mov.b32 zero, 0;
            set.neu.u32.f16x2 some, $2, zero;
            lop3.b32 low, $3, some, 0x80008000, 0x6A;
            prmt.b32 $0, low, $2, 0x5410;
            prmt.b32 $1, low, $2, 0x7632;
            sub.s32 $0, $0, 0x8000;
            sub.s32 $1, $1, 0x8000; }
            """,
            "=&r,=&r,r,r",  # written before all is read
            [high, low],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
    else:
        low = tl.where((high & 0x7FFF) == 0, 0, low)
        result = (high.to(tl.int32) << 16) + low.to(tl.int32)
    return result.to(tl.float32, bitcast=True)


@triton.jit
def halves(x, NATIVE: tl.constexpr):
    """Return the rounded high half of a float's bits and the signed low half. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    if NATIVE:
        high, low = tl.inline_asm_elementwise(
            """
            { .reg .b32 first, second, rounded, other;
            min.s32 first, $2, 0x7FFF7FFF;
            min.s32 second, $3, 0x7FFF7FFF;
            add.s32 rounded, first, 0x8000;
            add.s32 other, second, 0x8000;
            prmt.b32 $0, rounded, other, 0x7632;
            prmt.b32 $1, first, second, 0x5410; }
            """,
            "=&r,=&r,r,r",  # written before all is read
            [bits],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = tl.where(x == x, bits, 0x7FC00000)
        rounded = (bits + 0x8000) >> 16
        high = rounded.to(tl.int16)
        low = (bits - (rounded << 16)).to(tl.int16)
    return high, low


SMALLEST = tl.constexpr(SMALLEST_SCALE)
ABOVE_ONE = tl.constexpr(HEADROOM)
SPREAD, STIR = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
# Chances are 16 bits and a half, and come as numbers from 1 to 2.
HALF_OFF = tl.constexpr(1 - 2.0**-17)


@triton.jit
def load(at, mask):
    """Read what is inside, all where there is no mask."""
    return tl.load(at) if mask is None else tl.load(at, mask=mask, other=0)


@triton.jit
def root(x, NATIVE: tl.constexpr):
    """The square root, without the detour that Triton's takes for subnormals: they become zero."""
    return instruction(x, "sqrt.approx.ftz.f32 $0, $1;") if NATIVE else tl.sqrt(x)


@triton.jit
def inverse(x, NATIVE: tl.constexpr):
    """Return one over x, which of a subnormal number is infinite."""
    return instruction(x, "rcp.approx.ftz.f32 $0, $1;") if NATIVE else 1.0 / x


@triton.jit
def mix(x):
    """The finaliser of MurmurHash3: two multiplications, and every bit depends on every bit."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def scattered(first, at, seed):
    """Random bits of each place in a tensor. The lowest seven, of a product, are no good."""
    x = at.to(tl.uint32) * SPREAD + (first.to(tl.uint32) * SPREAD + seed)
    x ^= x >> 13
    return x * STIR


@triton.jit
def nearest(x, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Round to nearest, ties to even; fp16 saturates."""
    if tl.float16 == TYPE:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        rounded = x.to(tl.float16)
    elif tl.bfloat16 == TYPE and not NATIVE:  # the interpreter would cut the digits off
        bits = x.to(tl.uint32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(TYPE)
    return rounded


@triton.jit
def randomly(x, random, TYPE: tl.constexpr):
    """Round up or down by chance, given 16 random bits, so that the expectation is `x`."""
    if tl.float16 == TYPE:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        bits = x.to(tl.uint32, bitcast=True)
        normal = ((bits + (random >> 3)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        steps = x * 16777216.0  # of 2**-24, the spacing below 2**-14
        lower = tl.floor(steps)
        up = (random.to(tl.float32) + 0.5) * (1 / 65536) < steps - lower
        subnormal = (lower + up.to(tl.float32)) * (1 / 16777216)
        rounded = tl.where(tl.abs(x) < 1 / 16384, subnormal, normal).to(tl.float16)
    else:
        # The largest finite value stays; so does NaN, which a carry would turn into zero.
        limit: tl.constexpr = 3.3895313892515355e38
        bounded = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
        bits = bounded.to(tl.uint32, bitcast=True)
        high = tl.where(x == x, (bits + random) >> 16, 0x7FC0)
        rounded = high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return rounded


@triton.jit
def decoded(
    at_first, at_second, first_scale, second_scale, beta1, beta2, mask, some, NATIVE: tl.constexpr
):
    """Return both moments, decoded from 8 bits and multiplied by their beta."""
    code = plus_zero(load(at_first, mask), 0x80, NATIVE) - (ZERO + 128.0)
    m = code * tl.abs(code) * (load(first_scale, some) * (1 / 127**2) * beta1)
    code = plus_zero(load(at_second, mask), 0, NATIVE) - ZERO
    code *= code
    v = code * code * (load(second_scale, some) * (1 / 255**4) * beta2)
    return m, v


@triton.jit
def encode_first(m, random, at, at_scale, mask, some, NATIVE: tl.constexpr):
    """Write a first moment as the root of its share of the block's largest, rounded by chance."""
    scale = tl.maximum(tl.max(tl.abs(m), axis=1, keep_dims=True), SMALLEST) * ABOVE_ONE
    x = tl.abs(m) * (127.0**2 / scale)
    below = _down(root(x, NATIVE), 1.0, NATIVE)
    lower = below - ZERO
    width = 2 * lower + 1
    over = _chance(random, NATIVE) * width + (lower * lower - x - width * HALF_OFF)
    tl.store(at, signed_bytes(_one_more(below, over), m, NATIVE), mask=mask)
    tl.store(at_scale, scale, mask=some)


@triton.jit
def encode_second(v, square_root, random, at, at_scale, mask, some, NATIVE: tl.constexpr):
    """Write a second moment as the fourth root of its share, never zero, rounded by chance."""
    scale = tl.maximum(tl.max(v, axis=1, keep_dims=True), SMALLEST) * ABOVE_ONE
    x = v * (255.0**4 / scale)
    # A second moment of zero under a first that is not would be an update of m / eps.
    inverse_root = 255.0 / root(root(scale, NATIVE), NATIVE)
    below = tl.maximum(_down(root(square_root, NATIVE), inverse_root, NATIVE), ZERO + 1.0)
    lower = below - ZERO
    square = lower * lower
    width = (2 * lower + 1) * (2 * square + 2 * lower + 1)
    over = _chance(random >> 9, NATIVE) * width + (square * square - x - width * HALF_OFF)
    tl.store(at, last_bytes(_one_more(below, over), NATIVE), mask=mask)
    tl.store(at_scale, scale, mask=some)


@triton.jit
def _down(x, factor, NATIVE: tl.constexpr):
    """Return ZERO plus the product rounded down; an inexact root may give one too little."""
    if NATIVE:
        result = tl.inline_asm_elementwise(
            "fma.rm.ftz.f32 $0, $1, $2, 0f4B000000;",
            "=f,f,f",
            [x, factor],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        result = tl.floor(x * factor) + ZERO
    return result


@triton.jit
def _one_more(below, over):
    """Return the bits of a number, plus one where the other number is negative."""
    up = over.to(tl.uint32, bitcast=True) >> 31
    return (below.to(tl.uint32, bitcast=True) + up).to(tl.int32, bitcast=True)


@triton.jit
def _chance(random, NATIVE: tl.constexpr):
    """Return a number from 1 to 2 with bits 7 to 22 as its digits."""
    if NATIVE:  # in one instruction, which takes one constant; the other is kept
        result = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x3F800000, 0xEA;",
            "=f,r,r",
            [random, tl.full([1, 1], 0x7FFF80, tl.uint32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        result = ((random & 0x7FFF80) | 0x3F800000).to(tl.float32, bitcast=True)
    return result
