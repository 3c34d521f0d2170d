import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import UnsupportedError
from narrowcast.numerics import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    TF32,
    quantize,
    round_to,
    scale_for,
)
from narrowcast.numerics.methods import get_carrier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
FORMATS = [TF32, BF16, FP16, E4M3, E5M2, E2M1]
for_each_format = pytest.mark.parametrize("target", FORMATS, ids=lambda each: each.name)
GROUPS = ["tensor", "row", "column", "block"]
for_each_group = pytest.mark.parametrize("per", GROUPS)


def groups(x, per, block=128):
    """The parts of `x` that share a scale, by plain indexing."""
    rows, columns = x.shape
    match per:
        case "tensor":
            return [x]
        case "row":
            return [x[i] for i in range(rows)]
        case "column":
            return [x[:, j] for j in range(columns)]
        case "block":
            return [x[i, j : j + block] for i in range(rows) for j in range(0, columns, block)]


@given(
    amax=st.floats(width=32, min_value=2.0**-149, allow_infinity=False),
    target=st.sampled_from([*FORMATS, FP32]),
)
def test_a_scale_is_the_largest_power_of_two_that_fits(amax, target):
    scale = float(scale_for(torch.tensor([0.0, -amax]), target, per="tensor"))
    fraction, exponent = math.frexp(scale)
    assert fraction == 0.5
    assert amax * scale <= target.largest  # exact: Python multiplies in fp64
    assert amax * scale * 2 > target.largest or exponent == 128


@on_each_device
@pytest.mark.parametrize("target", [*FORMATS, FP32], ids=lambda each: each.name)
def test_a_scale_takes_amax_to_the_largest_value_and_not_beyond(target, device):
    exact = torch.tensor([target.largest]) * 2.0 ** -torch.arange(0, 60)
    above = exact[1:].nextafter(exact[:-1])
    found = [
        scale_for(each.to(device)[:, None], target, per="row").cpu().flatten()
        for each in (exact, above)
    ]
    assert torch.equal(found[0], 2.0 ** torch.arange(0, 60))
    assert torch.equal(found[1], 2.0 ** torch.arange(0, 59))


@on_each_device
@for_each_group
@for_each_format
def test_scales_are_those_of_each_group_alone(target, per, device):
    x = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    x = x * torch.exp2(torch.arange(-10.0, 10.0))[:, None]
    scales = scale_for(x.to(device), target, per=per, block=16).cpu().expand(x.shape)
    for part, scale in zip(groups(x, per, 16), groups(scales, per, 16), strict=True):
        assert torch.equal(scale, scale_for(part, target, per="tensor").expand(scale.shape))


@pytest.mark.parametrize("fill", [0.0, math.inf, -math.inf, math.nan])
@for_each_group
def test_the_scale_is_one_where_there_is_nothing_to_go_by(per, fill):
    x = torch.full((4, 8), 1000.0)
    x[1, 2] = fill
    if fill == 0:
        x[:] = 0
    scale = scale_for(x, E4M3, per=per, block=4).expand(x.shape)
    assert scale[1, 2] == 1


@pytest.mark.parametrize(
    ("dtype", "carrier"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scales_are_held_where_they_cannot_overflow(dtype, carrier):
    scale = scale_for(torch.tensor([6e-8], dtype=dtype), E5M2)
    assert scale.dtype == carrier
    assert scale.isfinite().all()


@pytest.mark.pairwise
@on_each_device
@for_each_group
@for_each_format
@pytest.mark.parametrize("shape", [(20, 50), (700, 300)], ids=["small", "in pieces"])
def test_quantize_rounds_each_group_on_its_scaled_grid(target, per, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x = x * torch.exp2(torch.arange(float(shape[0])) % 20 - 10)[:, None]
    scale = scale_for(x, target, per=per)
    expected = round_to(x * scale, target, saturate=True) / scale
    ours = quantize(x.to(device), target, per=per).cpu()
    np.testing.assert_array_equal(ours.numpy(), expected.numpy())


@pytest.mark.pairwise
@on_each_device
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@for_each_group
@for_each_format
def test_quantize_never_hides_what_is_not_finite(target, per, bad, device):
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) * 1e4
    x[2, 3] = bad
    ours = quantize(x.to(device), target, per=per, block=16).cpu()
    assert torch.equal(ours.isfinite(), x.isfinite())


@for_each_format
def test_finite_values_beside_an_infinity_saturate(target):
    x = torch.tensor([math.inf, 3e38, -1.0])
    expected = round_to(x[1:], target, saturate=True)
    assert torch.equal(quantize(x, target)[1:], expected)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@for_each_group
@for_each_format
def test_finite_values_stay_finite_at_both_ends_of_their_dtype(target, per, dtype):
    info = torch.finfo(dtype)
    for extreme in (info.max, info.tiny, info.smallest_normal * info.eps):
        x = torch.tensor([[extreme, -extreme, extreme / 3], [0.0, -0.0, extreme]], dtype=dtype)
        ours = quantize(x, target, per=per)
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        # Half a step of the target, or a whole one where the top of the dtype cuts it off; and no
        # scale is larger than what lifts 1 to the largest power of two.
        lift = get_carrier(x).largest_power
        step = (x.double().abs() * target.epsilon).clamp(min=target.smallest / lift)
        error = (ours.double() - x.double()).abs()
        assert (error <= step.clamp(min=target.smallest * extreme)).all()


def test_quantize_to_a_wider_format_changes_nothing():
    x = torch.randn(5)
    assert torch.equal(quantize(x, FP32), x)


def test_the_error_of_quantize_does_not_depend_on_the_magnitude():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    small, large = (quantize(x * factor, E4M3) / factor for factor in (2.0**-60, 2.0**60))
    assert torch.equal(small, large)


def test_a_scale_per_column_of_a_vector_is_refused():
    with pytest.raises(UnsupportedError, match=r"needs at least two dimensions, got 1.*Write"):
        scale_for(torch.ones(3), E4M3, per="column")
