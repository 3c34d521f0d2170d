"""Bytes and halves of words, taken apart and put together in as few instructions as there can be.

A compiler masks what it packs and extends what it unpacks, value by value. Here the instruction
that moves bytes does two or four values of a word at once. Elsewhere than on a GPU (`NATIVE` is
false) the same is said in plain arithmetic.
"""

import triton
import triton.language as tl

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
    """Return the last byte of each word, at most 127, with the sign of a float.

    Of a word of four, 128 more or less each of them, so that no byte borrows from the next.
    """
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
    """Return the float whose bits are a high half and, added to it, a low one with a sign.

    A high half that is a zero counts alone, as in `numerics.parts`. A zero has the same bits in
    fp16, which GPUs before Hopper compare too.
    """
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
    """Return the high half of a float's bits, rounded to nearest, and the low one with a sign.

    A NaN stays one, as in `numerics.parts`: its high half must not round to a zero. The one that
    a GPU computes has all bits but the sign.
    """
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
