"""Lines and parabolas are followed exactly, and not further than the past trusts them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.line import FittedCurve, extrapolation


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("ahead", [5, 10, 37])
def test_a_straight_line_goes_on(history_of, randn, degree, ahead):
    start, slope = [randn(6, 5), randn(4)], [randn(6, 5), randn(4)]
    history = history_of(lambda t: [a + t * b for a, b in zip(start, slope, strict=True)], 6)
    deltas = FittedCurve(degree).predict(history, ahead_steps=ahead)
    for delta, b in zip(deltas, slope, strict=True):
        assert torch.allclose(delta, ahead / 10 * b, rtol=1e-5, atol=1e-4)


def test_a_parabola_goes_on(history_of, randn):
    a, b, c = randn(7), randn(7), randn(7)
    history = history_of(lambda t: [a + t * b + t**2 * c], 5)
    (delta,) = FittedCurve(2).predict(history, ahead_steps=20)
    assert torch.allclose(delta, 2 * b + (6**2 - 4**2) * c, rtol=1e-4, atol=1e-3)


@given(
    moves=st.integers(2, 9),
    degree=st.sampled_from([1, 2]),
    ahead=st.floats(0.1, 5),
    seed=st.integers(0, 99),
)
def test_coefficients_follow_the_curve_that_numpy_fits(moves, degree, ahead, seed):
    points = np.random.default_rng(seed).normal(size=moves + 1)
    fitted = np.polynomial.Polynomial.fit(np.arange(moves + 1), points, degree)
    expected = fitted(moves + ahead) - fitted(moves)
    found = np.diff(points) @ extrapolation(moves, degree=degree, ahead=ahead)
    np.testing.assert_allclose(found, expected, atol=1e-9 * (1 + ahead) ** 2)


def test_a_tensor_that_turned_back_is_not_followed(history_of):
    def way(time):
        back = float(min(time, 4) - max(time - 4, 0))
        return [torch.full((3,), float(time)), torch.full((3,), back)]

    onwards, turned = FittedCurve(1).predict(history_of(way, 6), ahead_steps=10)
    assert torch.allclose(onwards, torch.ones(3))
    assert not turned.any()


def test_noise_is_followed_less_than_a_trend(history_of, randn):
    noise = [randn(4000) for _ in range(6)]
    history = history_of(lambda t: [noise[t], noise[t] / 10 + t], 6)
    wild, trend = FittedCurve(1).predict(history, ahead_steps=10)
    unshrunk, _ = FittedCurve(1, shrinks=False).predict(history, ahead_steps=10)
    assert wild.norm() < 0.5 * unshrunk.norm()
    assert 0.9 < float(trend.mean()) <= 1.1


@pytest.mark.parametrize("degree", [1, 2])
def test_weights_at_rest_stay_at_rest(history_of, degree):
    history = history_of(lambda _: [torch.ones(3)], 5)
    (delta,) = FittedCurve(degree).predict(history, ahead_steps=10)
    assert torch.equal(delta, torch.zeros(3))


def test_too_few_snapshots_are_refused_with_how_many_it_takes(history_of):
    history = history_of(lambda t: [torch.ones(3) * t], 3, most=5)
    with pytest.raises(RecipeError, match="quadratic was asked with 3 snapshots and needs 4"):
        FittedCurve(2).predict(history, ahead_steps=10)


def test_no_step_ahead_is_refused(history_of):
    history = history_of(lambda t: [torch.ones(3) * t], 3)
    with pytest.raises(RecipeError, match="write ahead_steps=1"):
        FittedCurve(1).predict(history, ahead_steps=0)
