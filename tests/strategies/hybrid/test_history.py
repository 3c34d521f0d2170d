"""Past weights are kept evenly spaced, and their line is followed as far as the past allows."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.strategies.hybrid.history import WeightHistory, slope

CPU = torch.device("cpu")


def history(way, snapshots, *, every=10):
    """Return the history of weights that are at `way(0)`, `way(1)`, … one interval apart."""
    made = WeightHistory(every=every)
    for time in range(snapshots):
        made.take(time * every, way(time))
    return made


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ahead", [5, 10, 37])
def test_a_straight_line_is_continued(ahead):
    start, move = [randn(6, 5), randn(4)], [randn(6, 5, seed=1), randn(4, seed=2)]
    past = history(lambda t: [a + t * b for a, b in zip(start, move, strict=True)], 6)
    for delta, b in zip(past.predict(ahead), move, strict=True):
        assert torch.allclose(delta, ahead / 10 * b, rtol=2**-7, atol=1e-3)  # movements are bf16


@given(moves=st.integers(1, 9), ahead=st.floats(0.1, 5), seed=st.integers(0, 99))
def test_coefficients_follow_the_line_that_numpy_fits(moves, ahead, seed):
    points = np.random.default_rng(seed).normal(size=moves + 1)
    fitted = np.polynomial.Polynomial.fit(np.arange(moves + 1), points, 1)
    expected = fitted(moves + ahead) - fitted(moves)
    np.testing.assert_allclose(np.diff(points) @ slope(moves, ahead=ahead), expected, atol=1e-9)


def test_a_tensor_that_turned_back_is_not_followed():
    def way(time):
        back = float(min(time, 4) - max(time - 4, 0))
        return [torch.full((3,), float(time)), torch.full((3,), back)]

    onwards, turned = history(way, 6).predict(10)
    assert torch.allclose(onwards, torch.ones(3))
    assert not turned.any()


def test_noise_is_followed_less_than_a_trend():
    noise = [randn(4000, seed=n) for n in range(6)]
    past = history(lambda t: [noise[t], noise[t] / 10 + t], 6)
    wild, trend = past.predict(10)
    assert wild.norm() < 0.5 * past._combine(slope(5, ahead=1.0))[0].norm()
    assert 0.9 < float(trend.mean()) <= 1.1


def test_weights_at_rest_stay_at_rest():
    (delta,) = history(lambda _: [torch.ones(3)], 5).predict(10)
    assert torch.equal(delta, torch.zeros(3))


@pytest.mark.parametrize(("snapshots", "ahead", "message"), [
    (2, 10, "needs 3 snapshots of the weights, 10 steps apart, got 2"),
    (3, 0, "ahead_steps must be 1 or more, got 0"),
])  # fmt: skip
def test_a_prediction_without_a_past_or_a_future_raises(snapshots, ahead, message):
    past = history(lambda t: [torch.ones(3) * t], snapshots)
    with pytest.raises(ConfigError, match=message):
        past.predict(ahead)


def test_small_movements_of_large_weights_keep_the_digits_of_bf16():
    past = history(lambda t: [torch.full((4,), 100 + t * 2**-10)], 3)
    assert torch.equal(past.predict(10)[0], torch.full((4,), 2**-10))


def test_the_oldest_snapshot_is_dropped_after_seven():
    past = history(lambda t: [randn(12, seed=t)], 9)
    assert past.state_dict()["steps"] == [20, 30, 40, 50, 60, 70, 80]
    assert past.bytes() == 12 * (4 + 6 * 2)


def test_a_snapshot_is_due_every_so_many_steps():
    past = WeightHistory(every=10)
    assert past.due(3)
    past.take(3, [randn(2)])
    assert next(step for step in range(4, 20) if past.due(step)) == 13
    assert past.due(2)


@pytest.mark.parametrize("step", [5, 21])
def test_after_a_gap_or_a_step_back_the_history_starts_over(step):
    past = history(lambda t: [randn(2, seed=t)], 2)
    past.take(step, [randn(2)])
    assert past.state_dict()["steps"] == [step]


def test_a_restored_history_continues_bit_for_bit():
    def way(time):
        return [randn(12, 10, seed=time), randn(6, seed=time)]

    first, second = history(way, 5), WeightHistory(every=10)
    second.load_state_dict(copy.deepcopy(first.state_dict()), device=CPU)
    for time in (5, 6, 7):
        for past in (first, second):
            past.take(time * 10, way(time))
        assert all(map(torch.equal, first.predict(20), second.predict(20)))


def test_a_history_with_another_spacing_raises():
    state = history(lambda t: [randn(2)], 2).state_dict()
    with pytest.raises(CheckpointError, match="every 10 steps"):
        WeightHistory(every=5).load_state_dict(state, device=CPU)
