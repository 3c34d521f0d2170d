import numpy as np
import pytest

from narrowcast.strategies.hybrid.control.averages import ALPHAS, MultiScaleAverage


def test_averages_are_the_sums_they_stand_for():
    values = np.random.default_rng(0).normal(size=40)
    average = MultiScaleAverage()
    for value in values:
        average = average.after(float(value))
    for got, alpha in zip((average.fast, average.medium, average.slow), ALPHAS, strict=True):
        weights = alpha * (1 - alpha) ** np.arange(39, -1, -1.0)
        weights[0] = (1 - alpha) ** 39
        assert got == pytest.approx(weights @ values, abs=1e-12)
    assert average.spread == average.fast - average.slow


def test_a_constant_is_stable_and_a_falling_number_has_a_negative_spread():
    same, falling = MultiScaleAverage(), MultiScaleAverage()
    for step in range(50):
        same, falling = same.after(3.0), falling.after(10.0 - step / 10)
    assert (same.spread, same.instability) == (0.0, 0.0)
    assert falling.spread < 0 < falling.instability
