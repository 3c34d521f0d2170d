"""The programs of the fused optimizer.

On an H200 one element takes about 27 instructions with fp32 moments and 77 with 8-bit moments;
memory leaves room for 180 and 97.
"""

import triton
import triton.language as tl

from narrowcast.kernels.adamw.numbers import (
    decoded,
    encode_first,
    encode_second,
    halves,
    inverse,
    joined,
    load,
    mix,
    nearest,
    randomly,
    root,
    scattered,
)


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
    before,
    FACTORS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Move the step counts of what is to be updated, and work out its coefficients."""
    location = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = location < count
    t = location.to(tl.int64)
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
    seed = mix(
        step.to(tl.int32).to(tl.uint32) * 0x9E3779B9 ^ mix((location + before).to(tl.uint32))
    )
    tl.store(seeds + t, seed.to(tl.int32, bitcast=True), mask=mask)
    if tl.program_id(0) == 0:
        slot = tl.arange(0, PLACES)
        tl.store(counters + slot, tl.zeros([PLACES], tl.int64))


@triton.jit
def update(
    chunks,
    addresses,
    gradients,
    leads,
    coefficients,
    seeds,
    counters,
    STORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    MASTER: tl.constexpr,
    MOMENTS: tl.constexpr,
    AVERAGED: tl.constexpr,
    LEAD: tl.constexpr,
    COUPLED: tl.constexpr,
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
    extra = _pointer(row + 1, BESIDE, ALIGNED) + first
    first_moment = _pointer(row + 2, FIRST, ALIGNED) + first
    second_moment = _pointer(row + 3, SECOND, ALIGNED) + first
    if AVERAGED:
        average = _pointer(row + 7, tl.float32, ALIGNED) + first
    LEADS: tl.constexpr = tl.float32 if LEAD == "fp32" else tl.bfloat16
    if LEAD != "none":
        lead = _pointer(leads + t, LEADS, ALIGNED) + first
    if tl.load(c + 10) == 0.0:
        return
    if MOMENTS == "int8":  # blocks of 256 in rows, so that each has its largest value
        rows = tl.arange(0, CHUNK // 256)[:, None]
        at = tl.max_contiguous(rows * 256 + tl.arange(0, 256)[None, :], [1, 8])
    else:
        at = tl.arange(0, CHUNK)
    # A chunk that is full needs no mask, which would cost an operation in ten.
    mask = None if FULL else at < left
    g = load(gradient + at, mask).to(tl.float32)
    at_weight, at_extra = weight + at, extra + at
    at_first, at_second = first_moment + at, second_moment + at

    old, stored, missing = _weight(at_weight, at_extra, mask, STORED, MASTER, NATIVE)
    if MOMENTS == "int8":
        at_scale = number.to(tl.int64) * (CHUNK // 256) + rows
        first_scale = _pointer(row + 4, tl.float32, False) + at_scale
        second_scale = _pointer(row + 5, tl.float32, False) + at_scale
        some = None if FULL else rows * 256 < left
        beta1, beta2 = tl.load(c + 3), tl.load(c + 5)
        m, v = decoded(
            at_first, at_second, first_scale, second_scale, beta1, beta2, mask, some, NATIVE
        )
    else:
        m = tl.load(c + 3) * load(at_first, mask).to(tl.float32)
        v = tl.load(c + 5) * load(at_second, mask).to(tl.float32)
    if AVERAGED:  # under way with the rest
        mean = load(average + at, mask)
    start = old  # where the optimizer is: ahead of the weight by its lead, if it has one
    if LEAD != "none":
        before = load(lead + at, mask).to(tl.float32)
        start = old + before

    due = g != 0.0
    g *= tl.load(c)
    if COUPLED:
        g += tl.load(c + 9) * start
    new = start - tl.load(c + 8) * start
    m += tl.load(c + 4) * g
    v += tl.load(c + 6) * g * g
    square_root = root(v, NATIVE)
    new -= tl.load(c + 1) * m * inverse(square_root * tl.load(c + 2) + tl.load(c + 7), NATIVE)

    if LEAD != "none":
        stays = new == start
        answer = old - tl.load(c + 12) * before
        ahead = nearest(tl.load(c + 13) * (new - answer), LEADS, NATIVE)
        tl.store(lead + at, ahead, mask=mask)
        new -= ahead.to(tl.float32)  # as it is kept: so the sum of both is where the optimizer is
    random = 0
    if MOMENTS != "fp32" or MASTER == "stochastic":
        seed = tl.load(seeds + t).to(tl.uint32, bitcast=True)
        random = scattered(first, at, seed)
    same, saved = _keep_weight(
        new, old, stored, missing, random, at_weight, at_extra, mask, STORED, MASTER, NATIVE
    )
    if MOMENTS == "int8":
        encode_first(m, random, at_first, first_scale, mask, some, NATIVE)
        encode_second(v, square_root, random, at_second, second_scale, mask, some, NATIVE)
    elif MOMENTS == "bf16":
        tl.store(at_first, randomly(m, (random >> 7) & 0xFFFF, tl.bfloat16), mask=mask)
        tl.store(at_second, randomly(v, random >> 16, tl.bfloat16), mask=mask)
    else:
        tl.store(at_first, m, mask=mask)
        tl.store(at_second, v, mask=mask)
    if AVERAGED:
        tl.store(average + at, mean + tl.load(c + 11) * (saved - mean), mask=mask)

    if METER:
        if LEAD != "none":  # the weight moves by itself after its lead; what counts is the update
            same = stays
        lost = tl.sum((due & same).to(tl.int32).reshape([CHUNK]), axis=0).to(tl.int64)
        counted = tl.sum(due.to(tl.int32).reshape([CHUNK]), axis=0).to(tl.int64)
        tl.atomic_add(counters + tl.program_id(0) % 64, (counted << 32) + lost, sem="relaxed")


@triton.jit
def _weight(
    at_weight, at_extra, mask, STORED: tl.constexpr, MASTER: tl.constexpr, NATIVE: tl.constexpr
):
    """Return a weight in full and its two parts; one that was written to counts alone."""
    stored = load(at_weight, mask)
    missing = stored
    if MASTER == "split":
        missing = load(at_extra, mask)
        old = joined(stored, missing, NATIVE)
    elif MASTER == "fp32":
        wide = load(at_extra, mask)
        old = tl.where(nearest(wide, STORED, NATIVE) == stored, wide, stored.to(tl.float32))
    else:
        old = stored.to(tl.float32)
        if MASTER == "kahan":
            missing = load(at_extra, mask)
            # A little less, so that half a spacing does not round to the neighbour.
            nearly = nearest(old + missing.to(tl.float32) * (1 - 1 / 256), STORED, NATIVE)
            missing = tl.where(nearly == stored, missing, tl.zeros_like(missing))
            old += missing.to(tl.float32)
    return old, stored, missing


@triton.jit
def _keep_weight(
    new,
    old,
    stored,
    missing,
    random,
    at_weight,
    at_extra,
    mask,
    STORED: tl.constexpr,
    MASTER: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Write what is kept of a weight; return where that is what it was, and its value in fp32."""
    if MASTER == "split":
        high, low = halves(new, NATIVE)
        tl.store(at_weight, high, mask=mask)
        tl.store(at_extra, low, mask=mask)
        same, full = new == old, new
    elif MASTER == "fp32":
        tl.store(at_extra, new, mask=mask)
        tl.store(at_weight, nearest(new, STORED, NATIVE), mask=mask)
        same, full = new == old, new
    else:
        if MASTER == "stochastic":
            # Other bits than the moments have.
            saved = randomly(new, mix(random ^ 0x9E3779B9) >> 16, STORED)
        else:
            saved = nearest(new, STORED, NATIVE)
        tl.store(at_weight, saved, mask=mask)
        same, full = saved == stored, saved.to(tl.float32)
        if MASTER == "kahan":
            still = nearest(new - saved.to(tl.float32), STORED, NATIVE)
            tl.store(at_extra, still, mask=mask)
            same = same & (still == missing)
            full += still.to(tl.float32)
    return same, full


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
