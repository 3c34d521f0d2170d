"""By how much components take part, in registers: given, one for all, or drawn.

Draws are counters put through a cipher (Philox: Salmon et al. 2011, whose seven rounds pass every
test of theirs) under a seed read from the device. The counter of a number is its row, its column,
and a stream by which several sites share a seed; so a backward pass draws what the forward pass
drew, and two numbers are never one.
"""

import triton
import triton.language as tl


@triton.jit
def _uniform(bits, BINOMIAL: tl.constexpr):
    """A number of [0, 1), or 0 or 1, from 32 random bits."""
    if BINOMIAL:
        return (bits >> 31).to(tl.float32)
    else:
        return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def delta_share(
    delta, routed, seed, row, rows, per_seed, value, stream, d_seed, d_row,
    DELTA: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """By how much what components leave takes part in each row, and which rows they compute."""
    here = row < rows
    left = tl.zeros_like(row).to(tl.float32)
    if DELTA == 1:
        left += value
    elif DELTA == 2:
        at = (row // per_seed).to(tl.int64) * d_seed + (row % per_seed).to(tl.int64) * d_row
        left += tl.load(delta + at, mask=here, other=0.0).to(tl.float32)
    elif DELTA >= 3:
        zero = row * 0
        bits, _, _, _ = tl.philox(tl.load(seed), zero, row, zero + stream, zero + 1, 7)
        left += _uniform(bits, DELTA == 4)
    chosen = here
    if ROUTED:
        chosen = here & (tl.load(routed + row, mask=here, other=0) != 0)
        left = tl.where(chosen, left, 1.0)
    return left, chosen


@triton.jit
def places(row, column, per_seed, of_seed, of_row, of_column):
    """Where the numbers of rows and columns are, for a tensor of any strides."""
    line = (row // per_seed).to(tl.int64) * of_seed + (row % per_seed).to(tl.int64) * of_row
    return line[:, None] + column[None, :].to(tl.int64) * of_column


@triton.jit
def share(source, bits, row, column, inside, per_seed, value, s_seed, s_row, s_column,
           SOURCE: tl.constexpr):  # fmt: skip
    """By how much what is not important takes part."""
    if SOURCE == 2:
        at = places(row, column, per_seed, s_seed, s_row, s_column)
        return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    elif SOURCE >= 3:
        return _uniform(bits, SOURCE == 4)
    else:
        return tl.zeros(inside.shape, tl.float32) + value


@triton.jit
def random_bits(seed, row, column, stream, SOURCE: tl.constexpr):
    """Four times 32 bits for each row and column, where draws are wanted."""
    counter = row[:, None] * 0 + column[None, :]
    if SOURCE >= 3:
        line = row[:, None] + column[None, :] * 0
        return tl.philox(tl.load(seed), counter, line, counter * 0 + stream, counter * 0, 7)
    else:
        return counter, counter, counter, counter
