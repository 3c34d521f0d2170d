import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.health.faults.faults import corrupted, unravel

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", ["inf", "nan", "large", "bit-flip"])
def test_one_number_is_another_and_all_others_are_what_they_were(dtype, value):
    tensor = torch.full((3, 4), 0.5, dtype=dtype).t()  # laid out otherwise than it is read
    found = corrupted(tensor, value, index=7)
    changed = (found != tensor).nonzero().tolist()
    assert changed == [[2, 1]]
    assert (tensor == 0.5).all()
    number = found[2, 1].item()
    expected = {"inf": math.isinf, "nan": math.isnan, "large": math.isfinite}
    assert expected.get(value, lambda x: x > 1e3)(number)


@given(st.floats(width=32, allow_nan=False))
def test_a_flipped_bit_is_the_highest_of_the_exponent(x):
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    (expected,) = struct.unpack("<f", struct.pack("<I", bits ^ (1 << 30)))
    found = corrupted(torch.tensor([x]), "bit-flip", index=0).item()
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_gradients_pass_as_if_nothing_had_been_replaced():
    x = torch.ones(4, requires_grad=True)
    corrupted(x * 3, "large", index=2).sum().backward()
    assert x.grad.tolist() == [3.0] * 4


@given(st.integers(0, 2**48), st.lists(st.integers(1, 5), max_size=4))
def test_every_index_is_a_spot_of_every_tensor(index, shape):
    tensor = torch.zeros(shape)
    tensor[unravel(tensor, index)] = 1.0
    assert tensor.sum() == 1.0
    assert tensor.flatten()[index % tensor.numel()] == 1.0
