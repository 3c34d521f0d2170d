"""The programs of the one-pass optimizer; `adamw` has their tables and launches, and the account.

Counted on an H200's instructions, one element takes about 27 of them with fp32 moments and 93 with
moments of 8 bits, where memory leaves room for 180 and 97. Hence what looks odd here: roots without
Triton's detour for subnormals, and conversions between bytes and floats by their bits.
"""

import triton
import triton.language as tl

from narrowcast.kernels.adamw_twin import HEADROOM, SMALLEST_SCALE

SMALLEST = tl.constexpr(SMALLEST_SCALE)
ABOVE_ONE = tl.constexpr(HEADROOM)
# 2²³ and a small integer: the last byte is that integer. Casts are four times as slow as additions.
ZERO = tl.constexpr(8388608.0)
# Added to x, it rounds down to ZERO plus an integer, for x from 0.5 on. If x is an integer one may
# be lost; the chance of getting it back is then one.
DOWN = tl.constexpr(8388607.5)
# Chances are 16 bits and a half, and come as numbers from 1 to 2.
HALF_OFF = tl.constexpr(1 - 2.0**-17)


@triton.jit
def begin(
    addresses,
    gradients,
    groups,
    hyper,
    factors,
    finite,
    coefficients,
    seeds,
    counters,
    count,
    FACTORS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Move the step counts of what is to be updated, and work out its coefficients."""
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = place < count
    t = place.to(tl.int64)
    live = mask & (tl.load(gradients + t, mask=mask, other=0) != 0) & (tl.load(finite) != 0)
    step_at = tl.load(addresses + t * 8 + 6, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, mask=live, other=0.0) + 1.0
    tl.store(step_at, step, mask=live)
    row = hyper + tl.load(groups + t, mask=mask, other=0) * 8
    lr = tl.load(row, mask=mask, other=0.0)
    beta1 = tl.load(row + 1, mask=mask, other=0.0)
    beta2 = tl.load(row + 2, mask=mask, other=0.0)
    eps = tl.load(row + 3, mask=mask, other=0.0)
    decay = tl.load(row + 4, mask=mask, other=0.0)
    power1 = tl.exp(step.to(tl.float64) * tl.load(row + 5, mask=mask, other=-1.0))
    power2 = tl.exp(step.to(tl.float64) * tl.load(row + 6, mask=mask, other=-1.0))
    decoupled = tl.load(row + 7, mask=mask, other=0.0)
    if FACTORS == "one":
        factor = tl.full([WIDTH], 1.0, tl.float32)
    elif FACTORS == "all":
        factor = tl.full([WIDTH], 1.0, tl.float32) * tl.load(factors)
    else:
        factor = tl.load(factors + t, mask=mask, other=0.0)
    out = coefficients + t * 16
    tl.store(out, factor, mask=mask)
    tl.store(out + 1, (lr / (1.0 - power1)).to(tl.float32), mask=mask)
    tl.store(out + 2, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32), mask=mask)
    tl.store(out + 3, beta1.to(tl.float32), mask=mask)
    # In fp32, 1 - 0.999 would be wrong in the fifth digit.
    tl.store(out + 4, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + 5, beta2.to(tl.float32), mask=mask)
    tl.store(out + 6, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + 7, eps.to(tl.float32), mask=mask)
    tl.store(out + 8, (lr * decay * decoupled).to(tl.float32), mask=mask)
    tl.store(out + 9, (decay * (1.0 - decoupled)).to(tl.float32), mask=mask)
    tl.store(out + 10, live.to(tl.float32), mask=mask)
    seed = _mix(step.to(tl.int32).to(tl.uint32) * 0x9E3779B9 ^ _mix(place.to(tl.uint32)))
    tl.store(seeds + t, seed.to(tl.int32, bitcast=True), mask=mask)
    if tl.program_id(0) == 0:
        slot = tl.arange(0, PLACES)
        tl.store(counters + slot, tl.zeros([PLACES], tl.int64))


@triton.jit
def update(
    chunks,
    addresses,
    gradients,
    coefficients,
    seeds,
    counters,
    STORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    MASTER: tl.constexpr,
    MOMENTS: tl.constexpr,
    METER: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
    CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Update one chunk of one weight."""
    record = chunks + tl.program_id(0).to(tl.int64) * 4
    t = tl.load(record).to(tl.int64)
    number = tl.load(record + 1)
    left = tl.load(record + 2)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    first = number.to(tl.int64) * CHUNK
    row = addresses + t * 8
    c = coefficients + t * 16
    # All addresses are under way before the first is needed, and before it is known whether any is.
    WEIGHT: tl.constexpr = tl.int16 if MASTER == "split" else STORED
    BESIDE: tl.constexpr = (
        tl.float32 if MASTER == "fp32" else tl.int16 if MASTER == "split" else STORED
    )
    FIRST: tl.constexpr = (
        tl.int8 if MOMENTS == "int8" else tl.float32 if MOMENTS == "fp32" else tl.bfloat16
    )
    SECOND: tl.constexpr = tl.uint8 if MOMENTS == "int8" else FIRST
    gradient = _pointer(gradients + t, GRADIENT, ALIGNED) + first
    weight = _pointer(row, WEIGHT, ALIGNED) + first
    beside = _pointer(row + 1, BESIDE, ALIGNED) + first
    first_moment = _pointer(row + 2, FIRST, ALIGNED) + first
    second_moment = _pointer(row + 3, SECOND, ALIGNED) + first
    if tl.load(c + 10) == 0.0:
        return
    if MOMENTS == "int8":  # blocks of 256 in rows, so that each has its largest value
        rows = tl.arange(0, CHUNK // 256)[:, None]
        at = rows * 256 + tl.arange(0, 256)[None, :]
    else:
        at = tl.arange(0, CHUNK)
    # A chunk that is full needs no mask, which would cost an operation in ten.
    mask = None if FULL else at < left
    g = _load(gradient + at, mask).to(tl.float32)
    at_weight, at_beside = weight + at, beside + at
    at_first, at_second = first_moment + at, second_moment + at

    # The weight, with all digits that are kept of it.
    if MASTER == "split":
        high = _load(at_weight, mask).to(tl.int32) << 16
        bits = high + _load(at_beside, mask).to(tl.int32)
        old = bits.to(tl.float32, bitcast=True)
    elif MASTER == "fp32":
        old = _load(at_beside, mask)
    else:
        stored = _load(at_weight, mask)
        old = stored.to(tl.float32)
        if MASTER == "kahan":
            missing = _load(at_beside, mask)
            old += missing.to(tl.float32)

    # The moments.
    if MOMENTS == "int8":
        at_scale = number.to(tl.int64) * (CHUNK // 256) + rows
        first_scale = _pointer(row + 4, tl.float32, False) + at_scale
        second_scale = _pointer(row + 5, tl.float32, False) + at_scale
        some = None if FULL else rows * 256 < left
        biased = _load(at_first, mask).to(tl.uint8, bitcast=True) ^ 0x80
        code = _plus_zero(biased) - (ZERO + 128.0)
        m = code * tl.abs(code) * (_load(first_scale, some) * (1 / 127**2))
        code = _plus_zero(_load(at_second, mask)) - ZERO
        code *= code
        v = code * code * (_load(second_scale, some) * (1 / 255**4))
    else:
        m = _load(at_first, mask).to(tl.float32)
        v = _load(at_second, mask).to(tl.float32)

    # Adam.
    due = g != 0.0
    g *= tl.load(c)
    g += tl.load(c + 9) * old
    new = old - tl.load(c + 8) * old
    m = tl.load(c + 3) * m + tl.load(c + 4) * g
    v = tl.load(c + 5) * v + tl.load(c + 6) * g * g
    root = _root(v, NATIVE)
    new -= tl.load(c + 1) * m * _inverse(root * tl.load(c + 2) + tl.load(c + 7), NATIVE)

    RANDOM: tl.constexpr = MOMENTS != "fp32" or MASTER == "stochastic"
    if RANDOM:
        seed = tl.load(seeds + t).to(tl.uint32, bitcast=True)
        # A chunk begins at a multiple of its length, a power of two: the exclusive or is the sum.
        random = _mix(at.to(tl.uint32) ^ (first.to(tl.uint32) ^ seed))

    # What is kept of the weight.
    if MASTER == "split":
        bits = new.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(at_weight, high.to(tl.int16), mask=mask)
        tl.store(at_beside, (bits - (high << 16)).to(tl.int16), mask=mask)
        same = new == old
    elif MASTER == "fp32":
        tl.store(at_beside, new, mask=mask)
        tl.store(at_weight, _nearest(new, STORED, NATIVE), mask=mask)
        same = new == old
    else:
        if MASTER == "stochastic":
            # Other bits than the moments have.
            kept = _randomly(new, _mix(random ^ 0x9E3779B9) >> 16, STORED)
        else:
            kept = _nearest(new, STORED, NATIVE)
        tl.store(at_weight, kept, mask=mask)
        same = kept == stored
        if MASTER == "kahan":
            still = _nearest(new - kept.to(tl.float32), STORED, NATIVE)
            tl.store(at_beside, still, mask=mask)
            same = same & (still == missing)

    # What is kept of the moments.
    if MOMENTS == "int8":
        scale = tl.maximum(tl.max(tl.abs(m), axis=1, keep_dims=True), SMALLEST) * ABOVE_ONE
        x = tl.abs(m) * (127.0**2 / scale)
        below = tl.maximum(_root(x, NATIVE) + DOWN, ZERO)
        lower = below - ZERO
        width = 2 * lower + 1
        up = _chance(random) * width < x - lower * lower + width * HALF_OFF
        code = below.to(tl.int32, bitcast=True) + up.to(tl.int32)
        sign = m.to(tl.int32, bitcast=True) >> 31
        tl.store(at_first, ((code ^ sign) - sign).to(tl.int8), mask=mask)
        tl.store(first_scale, scale, mask=some)
        scale = tl.maximum(tl.max(v, axis=1, keep_dims=True), SMALLEST) * ABOVE_ONE
        x = v * (255.0**4 / scale)
        # A second moment of zero under a first that is not would be an update of m / eps.
        below = _root(root, NATIVE) * (255.0 / _root(_root(scale, NATIVE), NATIVE)) + DOWN
        below = tl.maximum(below, ZERO + 1.0)
        lower = below - ZERO
        square = lower * lower
        width = (2 * lower + 1) * (2 * square + 2 * lower + 1)
        up = _chance(random >> 9) * width < x - square * square + width * HALF_OFF
        code = below.to(tl.int32, bitcast=True) + up.to(tl.int32)
        tl.store(at_second, code.to(tl.uint8), mask=mask)
        tl.store(second_scale, scale, mask=some)
    elif MOMENTS == "bf16":
        tl.store(at_first, _randomly(m, random & 0xFFFF, tl.bfloat16), mask=mask)
        tl.store(at_second, _randomly(v, random >> 16, tl.bfloat16), mask=mask)
    else:
        tl.store(at_first, m, mask=mask)
        tl.store(at_second, v, mask=mask)

    if METER:
        lost = tl.sum((due & same).to(tl.int32).reshape([CHUNK]), axis=0).to(tl.int64)
        counted = tl.sum(due.to(tl.int32).reshape([CHUNK]), axis=0).to(tl.int64)
        tl.atomic_add(counters + tl.program_id(0) % 64, (counted << 32) + lost, sem="relaxed")


@triton.jit
def _load(at, mask):
    return tl.load(at) if mask is None else tl.load(at, mask=mask, other=0)


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _root(x, NATIVE: tl.constexpr):
    """The square root, without the detour that Triton's takes for subnormals: they become zero."""
    if NATIVE:
        root = tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        root = tl.sqrt(x)
    return root


@triton.jit
def _inverse(x, NATIVE: tl.constexpr):
    if NATIVE:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def _plus_zero(byte):
    return (byte.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _chance(random):
    """Return a number from 1 to 2 with bits 7 to 22 as its digits."""
    return ((random & 0x7FFF80) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    """The finaliser of MurmurHash3: two multiplications, and every bit depends on every bit."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _nearest(x, TYPE: tl.constexpr, NATIVE: tl.constexpr):
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
def _randomly(x, random, TYPE: tl.constexpr):
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
