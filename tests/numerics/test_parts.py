"""Numbers in two parts, against exact arithmetic on every kind of bit pattern."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.numerics.rounding import (
    fitting_compensation,
    fitting_master,
    join,
    nearest,
    split,
)

# Subnormals, ties to both sides, the edges of binades, and everything else.
PATTERNS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**23 - 1),
    st.integers(0, 2**16 - 1).map(lambda high: (high << 16) | 0x8000),
    st.integers(0, 2**16 - 1).map(lambda high: (high << 16) | 0x7FFF),
    st.integers(0, 2**16 - 1).map(lambda high: high << 16),
)
LISTS = st.lists(PATTERNS, min_size=1, max_size=64)
SIXTEEN = [torch.bfloat16, torch.float16]


def floats(bits):
    return torch.tensor([struct.unpack("<f", struct.pack("<I", b))[0] for b in bits])


def ints(bits):
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32)


@given(bits=LISTS)
def test_split_and_join_return_every_number(bits):
    full = ints(bits).view(torch.float32)
    weight, low = split(full)
    assert weight.element_size() + low.element_size() == 4
    tiny = full.abs() < 2.0**-134
    expected = torch.where(tiny, full * 0, full).view(torch.int32)
    number = ~full.isnan()
    assert torch.equal(join(weight, low).view(torch.int32)[number], expected[number])


@given(bits=LISTS)
def test_a_nan_stays_one_in_both_parts_and_in_the_weight_alone(bits):
    """A GPU's own NaN has all bits but the sign: its high half would round to a zero."""
    full = ints([*bits, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]).view(torch.float32)
    weight, low = split(full)
    assert torch.equal(join(weight, low).isnan(), full.isnan())
    assert torch.equal(weight.isnan(), full.isnan())


@given(bits=PATTERNS)
def test_the_working_half_of_a_split_weight_is_the_nearest_bf16(bits):
    value = floats([bits])
    if not abs(value) < 3.3e38:  # beyond it lies the infinity of bf16, and NaN
        return
    weight, _ = split(value)
    exact = value.double()
    assert (weight.double() - exact).abs() == (value.bfloat16().double() - exact).abs()


@given(high=st.integers(0, 2**16 - 1), low=st.integers(-(2**15), 2**15 - 1))
def test_low_bits_of_another_number_change_a_weight_by_half_a_spacing_at_most(high, low):
    weight = torch.tensor([high - 2**16 if high >= 2**15 else high], dtype=torch.int16)
    weight = weight.view(torch.bfloat16)
    if not weight.isfinite():
        return
    full = join(weight, torch.tensor([low], dtype=torch.int16))
    if weight == 0:
        assert full == 0
        assert full.signbit() == weight.signbit()
        return
    # To the next number away from zero: towards it a spacing may be half as wide.
    spacing = weight.double().abs() * 2.0**-7
    assert (full.double() - weight.double()).abs() <= max(float(spacing), 2.0**-133) / 2


@pytest.mark.parametrize("dtype", SIXTEEN)
@given(bits=LISTS)
def test_a_master_fits_the_weight_that_was_rounded_from_it(dtype, bits):
    full = floats(bits)
    full = full[~full.isnan()]
    assert torch.equal(fitting_master(nearest(full, dtype), full), full)


@pytest.mark.parametrize("dtype", SIXTEEN)
@given(bits=LISTS)
def test_a_rounding_error_fits_the_weight_that_it_was_made_with(dtype, bits):
    full = floats(bits)
    full = full[full.abs() < 3e38]
    weight = nearest(full, dtype)
    error = nearest(full - weight.float(), dtype)
    assert torch.equal(fitting_compensation(weight, error), error)


@pytest.mark.parametrize("dtype", SIXTEEN)
@given(bits=LISTS, written=st.floats(-1e4, 1e4, width=16))
def test_what_is_written_to_a_weight_is_what_the_parts_make_of_it(dtype, bits, written):
    full = floats(bits)
    full = full[full.abs() < 3e38]
    weight = nearest(full, dtype)
    error = nearest(full - weight.float(), dtype)
    new = torch.full_like(weight, written)
    as_master = fitting_master(new, full)
    assert torch.equal(nearest(as_master, dtype), new)
    as_sum = new.float() + fitting_compensation(new, error).float()
    # The exact sum may be a tie, which rounds to an even neighbour. Away from zero, where spacings
    # are the wider ones.
    size = new.abs()
    half = (torch.nextafter(size, torch.full_like(size, torch.inf)).float() - size.float()) / 2
    assert ((as_sum - new.float()).abs() <= half).all()


def test_fp16_saturates():
    assert nearest(torch.tensor([1e5, -1e5]), torch.float16).tolist() == [65504.0, -65504.0]
    assert nearest(torch.tensor([torch.nan]), torch.float16).isnan().all()
