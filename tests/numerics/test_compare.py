import math

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowcast.numerics import BF16, E2M1, E4M3, E5M2, FP16, FP32, TF32, snr_db, ulp_distance

REFERENCE = [
    (BF16, ml_dtypes.bfloat16),
    (FP16, np.float16),
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
    (E2M1, ml_dtypes.float4_e2m1fn),
]
by_name = {"ids": lambda each: getattr(each, "name", "")}


def finite_values(dtype):
    size = np.dtype(dtype).itemsize
    count = 16 if dtype is ml_dtypes.float4_e2m1fn else 2 ** (8 * size)
    with np.errstate(invalid="ignore"):
        values = np.arange(count).astype(f"uint{8 * size}").view(dtype).astype(np.float64)
    return torch.from_numpy(np.unique(values[np.isfinite(values)]))


@pytest.mark.parametrize(("target", "dtype"), REFERENCE, **by_name)
def test_neighbours_are_one_step_apart_and_steps_add_up(target, dtype):
    values = finite_values(dtype)
    steps = ulp_distance(values[1:], values[:-1], target)
    assert (steps == 1).all()
    assert ulp_distance(values[0], values[-1], target).item() == len(values) - 1


@pytest.mark.parametrize(("target", "dtype"), REFERENCE[:2], **by_name)
def test_the_step_from_each_value_is_to_the_references_next(target, dtype):
    values = finite_values(dtype)[:-1]
    after = np.nextafter(values.numpy().astype(dtype), dtype(np.inf)).astype(np.float64)
    assert (ulp_distance(values, torch.from_numpy(after), target) == 1).all()


@pytest.mark.parametrize("target", [FP32, TF32], **by_name)
def test_fp32_distances_count_bit_patterns(target):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**31 - 2**24, (2, 1000)).astype(np.int64)
    dropped = 23 - target.mantissa_bits
    bits = (bits >> dropped) << dropped
    a, b = torch.from_numpy(bits.astype(np.int32).view(np.float32))
    expected = torch.from_numpy(np.abs(bits[0] - bits[1]) >> dropped)
    assert torch.equal(ulp_distance(a, b, target), expected)


def test_distance_counts_through_zero_and_ignores_its_sign():
    a = torch.tensor([-E4M3.smallest, -0.0])
    assert ulp_distance(a, torch.tensor([E4M3.smallest, 0.0]), E4M3).tolist() == [2, 0]


def test_what_is_not_on_the_grid_is_rounded_to_it_first():
    assert ulp_distance(torch.tensor([1.05]), torch.tensor([1.07]), E4M3).item() == 1


def test_an_infinity_is_one_step_beyond_the_largest():
    a = torch.tensor([math.inf, -math.inf, math.inf])
    b = torch.tensor([448.0, -448.0, math.inf])
    assert ulp_distance(a, b, E4M3).tolist() == [1, 1, 0]


def test_nan_is_far_from_everything_but_nan():
    a, b = torch.tensor([math.nan, math.nan, 1.0]), torch.tensor([math.nan, 1.0, math.nan])
    far = torch.iinfo(torch.int64).max
    assert ulp_distance(a, b, E4M3).tolist() == [0, far, far]


def test_snr_is_ten_times_the_logarithm_of_the_power_ratio():
    reference = torch.tensor([3.0, 4.0])
    assert snr_db(reference, reference + torch.tensor([0.3, -0.4])) == pytest.approx(20)
    assert snr_db(reference, torch.zeros(2)) == pytest.approx(0)


def test_snr_sums_in_fp64():
    # In fp32 a sum of squares would stop growing at 2**24, in fp16 it would overflow.
    reference = torch.full((2**16,), 1000.0, dtype=torch.float16)
    assert snr_db(reference, reference * 2) == 0.0


@pytest.mark.parametrize(
    ("reference", "approximation", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], math.inf),
        ([0.0, 0.0], [0.0, 1.0], -math.inf),
        ([1.0, 2.0], [1.0, math.inf], math.nan),
        ([1.0, math.nan], [1.0, math.nan], math.nan),
    ],
)
def test_snr_at_its_limits(reference, approximation, expected):
    found = snr_db(torch.tensor(reference), torch.tensor(approximation))
    assert found == pytest.approx(expected, nan_ok=True)
