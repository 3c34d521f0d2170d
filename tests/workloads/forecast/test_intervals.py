"""Conformal intervals hold as many values as they promise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.forecast.intervals import conformal_radius


@given(
    windows=st.integers(19, 60),
    level=st.sampled_from([0.5, 0.8, 0.9, 0.95]),
    seed=st.integers(0, 2**16),
)
def test_radius_is_the_rank_of_the_definition(windows, level, seed):
    residuals = np.random.default_rng(seed).standard_t(3, size=(windows, 2, 3))
    rank = int(np.ceil(round((windows + 1) * level, 9)))
    expected = np.sort(np.abs(residuals), axis=0)[rank - 1]
    radius = conformal_radius(torch.from_numpy(residuals), [level])
    np.testing.assert_array_equal(radius[0].numpy(), expected)


@pytest.mark.parametrize("noise", ["normal", "standard_cauchy", "exponential"])
@pytest.mark.parametrize(("windows", "level"), [(19, 0.95), (99, 0.8), (24, 0.8)])
def test_coverage_of_exchangeable_errors_is_the_level(noise, windows, level):
    """20,000 channels are as many independent trials; the law of the rank gives the coverage."""
    rng = np.random.default_rng(windows)
    errors = torch.from_numpy(getattr(rng, noise)(size=(windows + 1, 20_000, 1)))
    radius = conformal_radius(errors[:-1], [level])[0]
    share = (errors[-1].abs() <= radius).double().mean().item()
    expected = np.ceil(round((windows + 1) * level, 9)) / (windows + 1)
    assert level <= expected <= level + 1 / (windows + 1)
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 20_000) ** 0.5)


def test_missing_values_do_not_count():
    residuals = torch.arange(1.0, 10).reshape(9, 1, 1).repeat(1, 1, 2)
    residuals[4:, 0, 1] = torch.nan
    assert conformal_radius(residuals, [0.8])[0].tolist() == [[8, 4]]


def test_too_few_windows_raise_with_the_number():
    residuals = torch.zeros(18, 1, 4)
    with pytest.raises(ConfigError, match=r"interval of 0.95 needs 19 calibration windows.*got 18"):
        conformal_radius(residuals, [0.8, 0.95])
    with pytest.raises(ConfigError, match=r"levels must be between 0 and 1, got \[80\]"):
        conformal_radius(residuals, [80])
    with pytest.raises(ConfigError, match=r"shape \(windows, channels, horizon\), got \(18, 4\)"):
        conformal_radius(residuals[:, 0], [0.8])
