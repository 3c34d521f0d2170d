import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowcast.errors import UnsupportedError
from narrowcast.numerics import BF16, E2M1, E4M3, E5M2, FP16, FP32, TF32, quantize, round_to
from narrowcast.numerics.methods import CHUNK, DOUBLE, SINGLE, get_carrier, largest_shared

FORMATS = [FP32, TF32, BF16, FP16, E4M3, E5M2, E2M1]
for_each_format = pytest.mark.parametrize("target", FORMATS, ids=lambda each: each.name)
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "offset": lambda x: x[1:, 1:],
    "expanded": lambda x: x[:, None, :].expand(-1, 2, -1),
    "channels last": lambda x: x.view(1, 3, -1, 640).to(memory_format=torch.channels_last),
    "row": lambda x: x.flatten(),
}


@pytest.fixture(scope="module")
def large():
    """Three pieces and a bit, over many exponents."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3 * 280, 640, generator=generator)
    assert x.numel() > 2 * CHUNK
    return x * torch.exp2(torch.randint(-20, 20, x.shape, generator=generator))


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@for_each_format
def test_pieces_give_what_element_by_element_rounding_gives(target, layout, large):
    x = LAYOUTS[layout](large)
    ours = round_to(x, target)
    assert (ours.shape, ours.dtype) == (x.shape, x.dtype)
    rows = torch.split(x.flatten(), 1000)
    expected = torch.cat([round_to(row, target) for row in rows]).view(x.shape)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["transposed", "channels last"])
def test_a_dense_layout_is_kept(layout, large):
    x = LAYOUTS[layout](large)
    assert round_to(x, E4M3).stride() == x.stride()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1, 1)])
@for_each_format
def test_small_shapes_are_kept(target, shape):
    assert torch.equal(round_to(torch.ones(shape), target), torch.ones(shape))
    assert torch.equal(quantize(torch.ones(shape), target), torch.ones(shape))


@for_each_format
def test_the_input_is_left_alone(target, large):
    before = large.clone()
    round_to(large, target)
    quantize(large, target)
    assert torch.equal(large, before)


def test_no_gradient_flows_through_rounding():
    x = torch.ones(3, requires_grad=True)
    assert not any(round_to(x, target).requires_grad for target in FORMATS)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_what_is_not_a_real_float_is_refused(dtype):
    with pytest.raises(
        UnsupportedError, match=r"can be rounded to a format, got .*Convert it with"
    ):
        round_to(torch.zeros(2, dtype=dtype), E4M3)


def test_fp64_alone_is_carried_in_fp64():
    assert get_carrier(torch.zeros(1, dtype=torch.float64)) is DOUBLE
    assert get_carrier(torch.zeros(1, dtype=torch.bfloat16)) is SINGLE


@pytest.mark.parametrize("carrier", [SINGLE, DOUBLE], ids=["fp32", "fp64"])
def test_the_masks_of_a_carrier_part_a_float_into_its_fields(carrier):
    numbers = torch.tensor([-1.5, 0.75, -0.0, 3e10], dtype=carrier.float_dtype)
    bits = numbers.view(carrier.int_dtype)
    assert ((bits & carrier.sign_mask) != 0).tolist() == [True, False, True, False]
    power = (bits & carrier.exponent_mask).view(carrier.float_dtype)
    assert power.tolist() == [1.0, 0.5, 0.0, 2.0**34]
    assert carrier.to_bits(0.75) == int(bits[1])
    assert carrier.to_bits(0.5) | carrier.mantissa_mask == int(bits[1]) | carrier.mantissa_mask
    assert carrier.largest_power * (2 - torch.finfo(carrier.float_dtype).eps) == float(
        torch.finfo(carrier.float_dtype).max
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@for_each_format
def test_the_largest_shared_value_is_the_largest_that_both_have(target, dtype):
    patterns = torch.arange(2**15).to(torch.int16)
    if target.mantissa_bits <= 7:
        candidates = patterns.view(torch.bfloat16).float()
    else:
        candidates = torch.cat([patterns.view(torch.float16).float(), largest_of(target)])
    candidates = torch.cat([candidates, largest_of(target)])
    candidates = candidates[candidates.isfinite()]
    in_both = candidates[
        (candidates.to(dtype).float() == candidates) & (round_to(candidates, target) == candidates)
    ]
    found = largest_shared(target, dtype)
    assert found >= float(in_both.max())
    assert float(np.float32(found)) == found
    assert float(torch.tensor(found).to(dtype)) == found
    assert float(round_to(torch.tensor(found), target)) == found


def largest_of(target):
    return torch.tensor([target.largest])


def test_a_tensor_without_memory_keeps_its_shape():
    with FakeTensorMode():
        x = torch.empty(2000, 3000)
        found = [round_to(x, E4M3), round_to(x, BF16), round_to(x.t(), TF32)]
    assert [each.shape for each in found] == [x.shape, x.shape, x.t().shape]
