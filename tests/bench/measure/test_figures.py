import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists

from narrowcast.bench.measure.figures import speed, spread

SECONDS = lists(floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=60)


@given(seconds=SECONDS)
def test_median_and_quartiles_are_numpy_s(seconds):
    found = spread(seconds)
    expected = np.percentile(seconds, [25, 50, 75])
    # Interpolation is one multiplication and one addition, in either order.
    assert [found.low, found.median, found.high] == pytest.approx(expected, rel=1e-12)
    assert found.count == len(seconds)


@given(mine=SECONDS, baseline=SECONDS)
def test_speed_is_the_ratio_of_the_two_medians(mine, baseline):
    assert speed(mine, baseline) == pytest.approx(np.median(baseline) / np.median(mine), rel=1e-12)


def test_twice_as_fast_is_two():
    assert speed([1.0, 1.0, 9.0], [2.0, 2.0, 2.0]) == 2.0


def test_without_a_baseline_there_is_no_speed():
    assert speed([1.0], []) is None
