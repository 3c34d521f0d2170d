"""Bytes and halves of words, against numpy: in plain arithmetic here, by instructions on a GPU."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from narrowcast.kernels.adamw.numbers import halves, joined, last_bytes, plus_zero, signed_bytes
from narrowcast.kernels.launch import interpreted

DEVICE = torch.device("cpu" if interpreted() else "cuda")
COUNT = 1024


@triton.jit
def _plus_zero(x, out, flipped: tl.constexpr, count: tl.constexpr, native: tl.constexpr):
    at = tl.arange(0, count)[None, :]
    tl.store(out + at, plus_zero(tl.load(x + at), flipped, native))


@triton.jit
def _last_bytes(x, out, count: tl.constexpr, native: tl.constexpr):
    at = tl.arange(0, count)[None, :]
    tl.store(out + at, last_bytes(tl.load(x + at), native))


@triton.jit
def _signed_bytes(x, like, out, count: tl.constexpr, native: tl.constexpr):
    at = tl.arange(0, count)[None, :]
    tl.store(out + at, signed_bytes(tl.load(x + at), tl.load(like + at), native))


@triton.jit
def _joined(high, low, out, count: tl.constexpr, native: tl.constexpr):
    at = tl.arange(0, count)[None, :]
    tl.store(out + at, joined(tl.load(high + at), tl.load(low + at), native))


@triton.jit
def _halves(x, high, low, count: tl.constexpr, native: tl.constexpr):
    at = tl.arange(0, count)[None, :]
    top, bottom = halves(tl.load(x + at), native)
    tl.store(high + at, top)
    tl.store(low + at, bottom)


def launched(kernel, *arrays, **constants):
    """Run one program on copies of some arrays; return them as they are afterwards."""
    tensors = [torch.from_numpy(array.copy()).to(DEVICE) for array in arrays]
    kernel[(1,)](*tensors, **constants, count=COUNT, native=not interpreted())
    return [tensor.cpu().numpy() for tensor in tensors]


def words(seed):
    return np.random.default_rng(seed).integers(0, 2**32, COUNT, dtype=np.uint32)


@pytest.mark.parametrize("flipped", [0, 0x80])
def test_every_byte_is_added_to_two_to_the_23(flipped):
    bytes_ = np.arange(COUNT).astype(np.uint8)
    _, found = launched(_plus_zero, bytes_, np.zeros(COUNT, np.float32), flipped=flipped)
    assert np.array_equal(found, 2.0**23 + (bytes_ ^ flipped).astype(np.float32))


def test_the_last_byte_of_each_word_is_kept():
    given = words(0).view(np.int32)
    _, found = launched(_last_bytes, given, np.zeros(COUNT, np.uint8))
    assert np.array_equal(found, given.astype(np.uint8))


def test_every_magnitude_gets_the_sign_of_a_float_and_leaves_its_neighbours_alone():
    """Zero beside -0.0 too: a byte that borrowed would change the next."""
    magnitude = np.random.default_rng(1).permutation(np.arange(COUNT) % 128).astype(np.int32)
    like = np.random.default_rng(2).choice([-1.5, -0.0, 0.0, 2.0, -np.inf], COUNT)
    given = magnitude | np.int32(0x4B000000)  # the bits of 2**23 and the magnitude
    *_, found = launched(_signed_bytes, given, like.astype(np.float32), np.zeros(COUNT, np.int8))
    assert np.array_equal(found, np.where(np.signbit(like), -magnitude, magnitude))


def test_halves_of_a_float_are_its_nearest_bf16_and_what_is_missing():
    given = words(3).view(np.float32)
    given = given[np.isfinite(given) & (np.abs(given) < 3e38)]
    given = np.resize(np.concatenate([given, [0.0, -0.0, 1.0, 1.00390625, -1.01171875]]), COUNT)
    empty = np.zeros(COUNT, np.int16)
    _, high, low = launched(_halves, given.astype(np.float32), empty, empty)
    bits = given.astype(np.float32).view(np.int32).astype(np.int64)
    top = high.astype(np.int64) << 16
    assert np.array_equal((top + low).astype(np.int32), bits.astype(np.int32))
    assert np.abs(low.astype(np.int64)).max() <= 2**15  # no other bf16 is nearer
    *_, back = launched(_joined, high, low, np.zeros(COUNT, np.float32))
    assert np.array_equal(back.view(np.uint32), given.astype(np.float32).view(np.uint32))


def test_a_zero_counts_alone_whatever_is_beside_it_and_leaves_its_neighbour_alone():
    generator = np.random.default_rng(4)
    high = generator.choice([0, -(2**15), 1, 0x3F80, -0x4080, 0x7F7F, -1], COUNT).astype(np.int16)
    low = generator.integers(-(2**15), 2**15, COUNT).astype(np.int16)
    *_, found = launched(_joined, high, low, np.zeros(COUNT, np.float32))
    zero = (high & 0x7FFF) == 0
    expected = (high.astype(np.int64) << 16) + np.where(zero, 0, low)
    assert np.array_equal(found.view(np.int32), expected.astype(np.int32))
    assert zero.sum() > COUNT / 5


def test_the_nan_that_a_gpu_computes_does_not_round_to_a_zero():
    given = np.resize(np.array([0x7FFFFFFF, 0x3F800000, 0x7FFF8000, 0xFFC00000], np.uint32), COUNT)
    empty = np.zeros(COUNT, np.int16)
    _, high, low = launched(_halves, given.view(np.float32), empty, empty)
    *_, back = launched(_joined, high, low, np.zeros(COUNT, np.float32))
    ones = given == 0x3F800000
    assert np.array_equal(np.isnan(back), ~ones)
    assert (back[ones] == 1.0).all()
    weight = (high.astype(np.int64) << 16).astype(np.int32).view(np.float32)
    assert np.array_equal(np.isnan(weight), ~ones)
