import math

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowcast.numerics import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    TF32,
    CastLoss,
    cast_counts,
    cast_loss,
)
from narrowcast.numerics.methods import CHUNK

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
REFERENCE = [
    (BF16, ml_dtypes.bfloat16),
    (FP16, np.float16),
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_elements_are_counted_even_where_the_cast_would_hide_them(bad):
    expected = CastLoss(elements=2, nonfinite=1, overflowed=0, flushed=0)
    assert cast_loss(torch.tensor([1.0, bad]), E4M3) == expected


@on_each_device
@pytest.mark.parametrize(("target", "dtype"), REFERENCE, ids=lambda each: getattr(each, "name", ""))
def test_the_counts_are_what_a_reference_cast_loses(target, dtype, device):
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 2**32, 3 * CHUNK + 5, dtype=np.uint32)
    x = bits.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = x.astype(dtype).astype(np.float32)
    expected = CastLoss(
        elements=x.size,
        nonfinite=int((~np.isfinite(x)).sum()),
        overflowed=int((np.isfinite(x) & ~np.isfinite(rounded)).sum()),
        flushed=int(((x != 0) & (rounded == 0)).sum()),
    )
    assert cast_loss(torch.from_numpy(x).to(device), target) == expected
    assert min(expected.nonfinite, expected.overflowed, expected.flushed) > 0


def test_ties_at_the_edges_are_counted_by_where_they_round():
    edges = torch.tensor([464.0, 464.1, E4M3.smallest / 2, E4M3.smallest / 2 * 1.0001, 0.0])
    assert cast_loss(edges, E4M3) == CastLoss(elements=5, nonfinite=0, overflowed=1, flushed=1)
    edges = torch.tensor([61440.0, 61439.0])
    assert cast_loss(edges, E5M2).overflowed == 1


def test_e2m1_counts_what_its_saturation_cuts():
    x = torch.tensor([6.9, 7.0, -100.0, 0.25, 0.26])
    assert cast_loss(x, E2M1) == CastLoss(elements=5, nonfinite=0, overflowed=2, flushed=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_fp32_carries_everything_narrower(dtype):
    x = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal], dtype=dtype)
    expected = CastLoss(elements=2, nonfinite=0, overflowed=0, flushed=0)
    assert cast_loss(x, FP32) == cast_loss(x, TF32 if dtype != torch.float32 else FP32) == expected


def test_fp64_is_counted_in_fp64():
    x = torch.tensor([1e39, 1e-46, 1.0], dtype=torch.float64)
    assert cast_loss(x, FP32) == CastLoss(elements=3, nonfinite=0, overflowed=1, flushed=1)


@pytest.mark.parametrize("shape", [(0,), (), (3, 0)])
def test_no_loss_is_found_in_few_elements(shape):
    found = cast_loss(torch.ones(shape), E4M3)
    assert (found.overflow_rate, found.flush_rate) == (0, 0)
    assert found.elements == math.prod(shape)


def test_counts_of_several_tensors_add_up():
    parts = [torch.tensor([1e9, 1.0]), torch.tensor([math.nan]), torch.tensor([1e-9, 0.0])]
    total = sum(cast_counts(each, E4M3) for each in parts)
    assert total.dtype == torch.int64
    assert total.tolist() == [5, 1, 1, 1]


@pytest.mark.parametrize("shape", [(CHUNK, 2), (1000, 700)])
def test_a_transposed_tensor_counts_the_same(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e3
    assert cast_loss(x.t(), E4M3) == cast_loss(x, E4M3)


def test_rates_are_shares_of_all_elements():
    found = cast_loss(torch.tensor([1e9, 1.0, 1e-9, 1e-9]), E4M3)
    assert (found.overflow_rate, found.flush_rate) == (0.25, 0.5)
