import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.strategies.hybrid.control.divergence import (
    Monitor,
    Observation,
    observed,
)
from narrowcast.strategies.hybrid.control.divergence_settings import DivergenceSettings
from narrowcast.strategies.hybrid.control.recovery import Level

USUAL = DivergenceSettings()


def run(losses, *, settings=USUAL, norms=None, monitor=None):
    """Return the monitor at the end and every assessment."""
    monitor, told = monitor or Monitor(), []
    for index, loss in enumerate(losses):
        norm = None if norms is None else float(norms[index])
        seen = Observation(loss=float(loss), gradient_norm=norm)
        monitor, assessment = observed(monitor, seen, settings=settings)
        told.append(assessment)
    return monitor, told


def levels(told):
    return [each.level for each in told]


def signal(assessment, name):
    return next(each for each in assessment.signals if each.name == name)


def noisy(steps, *, deviation=0.05, seed=0, start=4.0, end=2.0):
    time = np.arange(steps)
    noise = np.random.default_rng(seed).normal(scale=deviation, size=steps)
    return end + (start - end) * np.exp(-time / 500) + noise


@pytest.mark.parametrize("sigma", [2.2, 2.5, 3.0, 3.5])
@pytest.mark.parametrize("deviation", [0.02, 0.2])
def test_white_noise_around_a_falling_curve_warns_less_than_once_in_a_thousand_steps(
    sigma, deviation
):
    steps = 5_000
    settings = DivergenceSettings(loss_sigma=sigma)
    _, told = run(noisy(steps, deviation=deviation), settings=settings)
    warned = sum(level >= Level.WARNING for level in levels(told))
    assert warned < steps / 1000
    cautious = sum(level == Level.CAUTION for level in levels(told))
    assert cautious < steps / 100


def test_skewed_noise_with_heavy_tails_warns_less_than_once_in_a_thousand_steps():
    steps = 10_000
    noise = np.random.default_rng(0).exponential(size=steps) - 1
    _, told = run(3 + 0.2 * noise)
    assert sum(level >= Level.WARNING for level in levels(told)) < steps / 1000


def test_noise_is_estimated_as_it_is_in_spite_of_the_trend():
    # A fall of 20 deviations over the memory of the mean would be taken for noise around it.
    time = np.arange(2000)
    noise = np.random.default_rng(1).normal(scale=0.05, size=2000)
    monitor, _ = run(20 - 0.01 * time + noise)
    assert monitor.noise(USUAL) == pytest.approx(
        0.05, rel=0.25
    )  # 200 batches: 5 sigma of 1/sqrt(400)


def test_a_fall_of_the_loss_is_no_divergence_however_fast():
    losses = np.concatenate([noisy(300), noisy(300) - 100])
    _, told = run(losses)
    assert max(signal(each, "loss").level for each in told[30:]) <= Level.CAUTION
    assert levels(told)[300] == Level.NORMAL


def test_a_curve_that_flattens_at_once_is_no_divergence():
    falling = np.linspace(10, 2, 300)
    noise = np.random.default_rng(2).normal(scale=0.01, size=900)
    _, told = run(np.concatenate([falling, np.full(600, 2.0)]) + noise)
    assert max(signal(each, "loss").level for each in told[30:]) <= Level.CAUTION


@pytest.mark.parametrize(
    ("height", "level"),
    [(0, Level.NORMAL), (9.6, Level.CAUTION), (16, Level.WARNING), (30, Level.CRITICAL)],
)
def test_a_spike_of_so_many_deviations_has_its_level(height, level):
    # A quarter of a spike is in the mean of the last four.
    monitor, _ = run(noisy(1000, start=2.0))
    monitor = monitor.rearmed()
    loss = monitor.mean + height * monitor.noise(USUAL)
    _, assessment = observed(monitor, Observation(loss=loss), settings=USUAL)
    assert assessment.level == level


def test_the_thresholds_of_a_rise_are_those_of_the_table():
    monitor, _ = run(noisy(1000, start=2.0))
    monitor = monitor.rearmed()
    for share, level in [(0.69, 0), (0.71, 1), (0.99, 1), (1.01, 2), (1.99, 2), (2.01, 3)]:
        loss = monitor.mean + 4 * share * 3.0 * monitor.noise(USUAL)
        assert observed(monitor, Observation(loss=loss), settings=USUAL)[1].level == level


def test_a_lasting_rise_of_six_deviations_is_critical_within_ten_steps():
    monitor, _ = run(noisy(1000, start=2.0))
    _, told = run(noisy(10, start=2.0, seed=3) + 6 * 0.05, monitor=monitor)
    assert max(levels(told)) == Level.CRITICAL


def test_one_wild_batch_does_not_raise_what_later_ones_are_judged_by():
    monitor, _ = run(noisy(1000, start=2.0))
    spiked, told = run([1e6], monitor=monitor)
    assert levels(told) == [Level.CRITICAL]
    assert spiked.noise(USUAL) < 1.1 * monitor.noise(USUAL)
    assert spiked.mean - monitor.mean < 0.05 * monitor.noise(USUAL)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("where", ["loss", "gradient_norm", "predicted_loss"])
def test_what_is_not_finite_is_critical_from_the_first_step_on_and_not_remembered(bad, where):
    before, _ = run(noisy(5))
    for monitor in (Monitor(), before):
        seen = Observation(**{"loss": 1.0, where: bad})
        after, assessment = observed(monitor, seen, settings=USUAL)
        assert assessment.level == Level.CRITICAL
        assert after == monitor


def test_three_warnings_in_a_row_are_critical_and_two_are_not():
    losses = noisy(100, start=2.0)
    norms = np.ones(100)
    norms[60:62] = norms[70:73] = 500
    _, told = run(losses, norms=norms)
    got = levels(told)
    assert got[60:63] == [Level.WARNING, Level.WARNING, Level.NORMAL]
    assert got[70:73] == [Level.WARNING, Level.WARNING, Level.CRITICAL]


def test_a_run_recovers_to_normal():
    monitor, _ = run(noisy(1000, start=2.0))
    spiked, told = run([monitor.mean + 16 * monitor.noise(USUAL)], monitor=monitor)
    assert levels(told) == [Level.WARNING]
    _, after = run(noisy(30, start=2.0, seed=4), monitor=spiked)
    assert set(levels(after)[10:]) == {Level.NORMAL}


@pytest.mark.parametrize(
    ("ratio", "name", "level"),
    [
        (99, "gradient norm", Level.NORMAL),
        (101, "gradient norm", Level.WARNING),
        (999, "gradient norm", Level.WARNING),
        (1001, "gradient norm", Level.CRITICAL),
        (0.011, "vanishing", Level.NORMAL),
        (0.009, "vanishing", Level.WARNING),
    ],
)
def test_a_gradient_norm_is_judged_by_the_first_fifty(ratio, name, level):
    monitor, _ = run(noisy(50), norms=np.full(50, 2.0))
    seen = Observation(loss=monitor.mean, gradient_norm=2.0 * ratio)
    _, assessment = observed(monitor, seen, settings=USUAL)
    assert signal(assessment, name).level == level
    assert signal(assessment, name).expected == 2.0


def test_a_gradient_that_has_vanished_stays_a_warning():
    norms = np.concatenate([np.ones(60), np.full(40, 1e-4)])
    _, told = run(noisy(100, start=2.0), norms=norms)
    assert set(levels(told)[60:]) == {Level.WARNING}


@pytest.mark.parametrize(
    ("predicted", "level"),
    [
        (2.0, Level.NORMAL),
        (1.61, Level.NORMAL),
        (2.41, Level.CAUTION),
        (1.01, Level.CAUTION),
        (0.9, Level.WARNING),
        (4.0, Level.WARNING),
        (0.0, Level.WARNING),  # a residual of zero was once taken for a prediction
    ],
)
def test_a_predicted_loss_is_judged_by_its_relative_error(predicted, level):
    seen = Observation(loss=2.0, predicted_loss=predicted)
    _, assessment = observed(Monitor(), seen, settings=USUAL)
    assert signal(assessment, "prediction").level == level
    assert signal(assessment, "prediction").deviation == pytest.approx(abs(predicted - 2) / 2)


def test_white_noise_turns_two_times_in_three_and_does_not_oscillate():
    _, told = run(noisy(5000, start=2.0))
    found = [signal(each, "oscillation") for each in told[99:]]
    assert np.mean([each.value for each in found]) == pytest.approx(2 / 3, abs=0.02)
    assert np.std([each.deviation for each in found]) == pytest.approx(1, abs=0.3)
    assert max(each.level for each in found) <= Level.CAUTION


def test_a_loss_that_turns_at_every_step_oscillates():
    losses = 2 + 0.01 * (-1.0) ** np.arange(100)
    _, told = run(losses)
    assert signal(told[-1], "oscillation").value == 1
    assert told[-1].level == Level.WARNING  # and never more: a window sees the same turns again


def test_a_noise_free_run_that_grows_by_a_twentieth_a_step_is_critical_within_twenty():
    losses = np.concatenate([np.linspace(3, 2, 1000), 2 * 1.05 ** np.arange(20)])
    _, told = run(losses)
    assert max(levels(told)[:1000]) == Level.NORMAL
    assert max(levels(told)[1000:]) == Level.CRITICAL


def test_the_summary_names_what_was_seen():
    monitor, _ = run(noisy(60), norms=np.ones(60))
    seen = Observation(loss=monitor.mean, gradient_norm=2000.0)
    _, assessment = observed(monitor, seen, settings=USUAL)
    assert assessment.summary == "critical: gradient norm 2000 (critical)"
    assert run([1.0])[1][0].summary == "normal"


@given(st.lists(st.floats(), max_size=60))
def test_a_monitor_comes_back_from_json_and_goes_on_the_same(losses):
    monitor, _ = run(losses)
    again = Monitor.from_json(json.loads(json.dumps(monitor.to_json())))
    assert again == monitor
    assert run([1.0, 2.0], monitor=again) == run([1.0, 2.0], monitor=monitor)
