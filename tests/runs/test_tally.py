import math

import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists

from narrowcast.runs import StepRecord
from narrowcast.runs.tally import KEPT, Smooth, Tally


def step(number: int, **values: object) -> StepRecord:
    defaults = {
        "loss": 2.0,
        "loss_scale": 1.0,
        "applied": True,
        "skip_reason": "",
        "grad_norm": 1.0,
        "lr": 0.1,
        "lost_updates": None,
        "items": 100,
        "seconds": 0.5,
        "peak_bytes": 0,
    }
    return StepRecord(step=number, **(defaults | values))


@given(values=lists(floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_smoothed_value_is_the_mean_with_weights_that_fall_geometrically(values):
    smooth = Smooth()
    for x in values:
        smooth = smooth.after(x)
    weights = [KEPT ** (len(values) - 1 - i) for i in range(len(values))]
    expected = math.fsum(w * x for w, x in zip(weights, values, strict=True)) / math.fsum(weights)
    assert smooth.value == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_does_not_hide_the_losses_after_it(bad):
    tally = Tally(steps=3).after(step(1)).after(step(2, loss=bad)).after(step(3))
    assert tally.loss == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_while_the_loss_is_not_finite_no_older_one_is_shown_in_its_place(bad):
    tally = Tally(steps=3).after(step(1)).after(step(2, loss=bad))
    assert tally.loss == bad or (math.isnan(bad) and math.isnan(tally.loss))


def test_pace_and_time_left_follow_from_the_steps():
    tally = Tally(steps=10)
    for number in range(1, 6):
        tally = tally.after(step(number))
    assert tally.items_per_second == pytest.approx(200)
    assert tally.seconds_left == pytest.approx(5 * 0.5)
    assert (tally.items, tally.seconds) == (500, 2.5)


def test_the_first_steps_of_a_process_do_not_count_for_the_time_that_is_left():
    tally = Tally(steps=100).after(step(1, seconds=50.0))
    assert tally.step_seconds == 50.0
    assert tally.items_per_second == 2
    for number in (2, 3):
        tally = tally.after(step(number, seconds=5.0))
        assert math.isnan(tally.seconds_left)
    tally = tally.after(step(4))
    assert tally.seconds_left == pytest.approx(96 * 0.5)
    assert tally.items_per_second == pytest.approx(200)
    again = tally.resumed().after(step(5, seconds=50.0))
    assert math.isnan(again.seconds_left)
    assert again.seconds == tally.seconds + 50.0


def test_only_steps_that_were_not_applied_count_as_skipped():
    tally = Tally(steps=3).after(step(1)).after(step(2, applied=False)).after(step(3))
    assert tally.skipped == 1
