import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.signals import RunningStatistics


def of(chunks):
    running = RunningStatistics()
    for chunk in chunks:
        running.add(chunk)
    return running.result()


@given(offset=st.floats(-1e4, 1e4), scale=st.floats(1e-3, 1e4), cut=st.integers(1, 99))
def test_mean_and_spread_are_numpys_in_float64(offset, scale, cut):
    chance = np.random.default_rng(cut)
    x = torch.tensor(chance.normal(offset, scale, (100, 3)), dtype=torch.float32)
    found = of([x[:cut], x[cut:]])
    exact = x.double().numpy()
    size = abs(offset) + scale
    np.testing.assert_allclose(found.mean, exact.mean(0), atol=size * 2**-20)
    np.testing.assert_allclose(found.spread, exact.std(0), rtol=1e-4, atol=size * 2**-20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1e-6, 0.1, 3.1, 60_000.0])
def test_a_constant_channel_has_no_spread(dtype, value):
    x = torch.full((1000, 2), value, dtype=dtype)
    x[:, 1] = torch.arange(1000)
    found = of(x.split(77))
    assert found.constant.tolist() == [True, False]
    assert found.mean[0] == pytest.approx(float(x[0, 0]), rel=1e-6)


def test_a_small_channel_is_not_a_constant_one():
    x = 1e-7 * torch.randn(1000, 1, generator=torch.Generator().manual_seed(0))
    assert of([x]).spread[0] == pytest.approx(float(x.double().std()), rel=1e-2)


def test_no_rows_are_refused():
    with pytest.raises(ConfigError, match=r"signals must have .* got 0"):
        RunningStatistics().result()


@pytest.mark.parametrize("size", [1e19, 1e30, 3e38])
def test_squares_that_overflow_are_refused(size):
    signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(500, 1)
    with pytest.raises(ConfigError, match="squares of the signals overflow float32"):
        of((size * signs).split(100))
