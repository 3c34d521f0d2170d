"""The monitor reports a loss that rises beyond its noise, and neither noise nor a falling loss."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.strategies.hybrid.divergence import DivergenceMonitor


def run(losses, *, sigma=3.0, monitor=None, norms=None):
    """Return the monitor after losses, and at how many of them it saw a divergence."""
    monitor, seen = monitor or DivergenceMonitor(sigma=sigma), 0
    for number, loss in enumerate(losses):
        monitor = monitor.after(float(loss), None if norms is None else float(norms[number]))
        seen += bool(monitor.problem)
        monitor = monitor.cleared() if monitor.problem else monitor
    return monitor, seen


def noisy(steps, *, deviation=0.05, seed=0, start=4.0, end=2.0):
    time = np.arange(steps)
    noise = np.random.default_rng(seed).normal(scale=deviation, size=steps)
    return end + (start - end) * np.exp(-time / 500) + noise


@pytest.mark.parametrize("sigma", [2.5, 3.5])
@pytest.mark.parametrize("deviation", [0.02, 0.2])
def test_noise_around_a_falling_loss_is_seen_less_than_once_in_a_thousand_steps(sigma, deviation):
    _, seen = run(noisy(5000, deviation=deviation), sigma=sigma)
    assert seen < 5


def test_skewed_noise_is_seen_less_than_once_in_a_thousand_steps():
    noise = np.random.default_rng(0).exponential(size=10_000) - 1
    _, seen = run(3 + 0.2 * noise)
    assert seen < 10


def test_noise_is_estimated_in_spite_of_a_trend():
    noise = np.random.default_rng(1).normal(scale=0.05, size=2000)
    monitor, _ = run(20 - 0.01 * np.arange(2000) + noise)
    assert monitor.noise == pytest.approx(0.05, rel=0.25)  # 5 sigma of 200 batches


def test_a_fast_fall_is_no_divergence():
    _, seen = run(np.concatenate([noisy(300), noisy(300) - 100]))
    assert seen == 0


@pytest.mark.parametrize(("height", "diverged"), [(0, False), (11, False), (13, True)])
def test_a_spike_counts_where_the_mean_of_four_is_beyond_sigma(height, diverged):
    monitor, _ = run(noisy(1000, start=2.0))
    monitor = monitor.cleared()
    after = monitor.after(monitor.mean + height * monitor.noise)
    assert bool(after.problem) == diverged


def test_a_lasting_rise_of_six_deviations_is_seen_within_ten_steps():
    monitor, _ = run(noisy(1000, start=2.0))
    _, seen = run(noisy(10, start=2.0, seed=3) + 6 * 0.05, monitor=monitor)
    assert seen


def test_one_wild_batch_does_not_raise_what_later_ones_are_compared_with():
    monitor, _ = run(noisy(1000, start=2.0))
    after = monitor.after(1e6)
    assert "standard deviations" in after.problem
    assert after.noise < 1.1 * monitor.noise
    assert after.mean - monitor.mean < 0.05 * monitor.noise


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_nonfinite_numbers_are_a_divergence_and_change_no_statistics(bad):
    before, _ = run(noisy(5))
    for numbers in ((bad, None), (1.0, bad)):
        after = before.after(*numbers)
        assert after.problem
        assert after.cleared() == before.cleared()


@pytest.mark.parametrize(("times", "diverged"), [(99, False), (101, True)])
def test_a_gradient_norm_is_compared_with_the_first_fifty(times, diverged):
    monitor, _ = run(noisy(50), norms=np.full(50, 2.0))
    after = monitor.after(monitor.mean, 2.0 * times)
    assert ("gradient norm" in after.problem) == diverged


@given(st.lists(st.floats(), max_size=60))
def test_a_monitor_restored_from_json_continues_the_same(losses):
    monitor, _ = run(losses)
    again = DivergenceMonitor(**json.loads(json.dumps(monitor.to_json())))
    assert again == monitor
    assert run([1.0, 2.0], monitor=again) == run([1.0, 2.0], monitor=monitor)
