import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists

from narrowcast.bench.contenders import Contender
from narrowcast.bench.coordinator import Result
from narrowcast.bench.measure.learning import quality_figures, smoothed, steps_to, thinned
from narrowcast.runs import Metric, TaskInfo

LOSSES = lists(floats(min_value=0, max_value=100), min_size=1, max_size=80)
REFERENCE = Contender(name="fp32", kind="narrowcast")


def ran(name, losses, *, seed=0, evaluated=2.0, seconds=0.5):
    run = {
        "seed": seed,
        "losses": losses,
        "step_seconds": seconds,
        "skipped": 0,
        "peak_bytes": 1,
        "metrics": {"perplexity": math.exp(evaluated), "loss": evaluated},
        "task": TaskInfo(metrics=(Metric(name="loss"), Metric(name="perplexity"))).to_json(),
    }
    result = Result(contender=Contender(name=name, kind="narrowcast"))
    result.rounds = [(0, {"runs": [run]})]
    return result


@given(losses=LOSSES, window=integers(1, 20))
def test_full_windows_are_those_of_a_convolution(losses, window):
    found = smoothed(losses, window)
    assert len(found) == len(losses)
    if len(losses) >= window:
        expected = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        assert found[window - 1 :] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_one_infinite_loss_is_forgotten_after_its_window():
    assert smoothed([1.0, math.inf, 1.0, 1.0], 2)[-1] == 1.0


def test_a_loss_is_reached_by_the_average_not_by_a_lucky_batch():
    losses = [3.0, 0.0, 3.0, 3.0, 1.0, 1.0]
    assert steps_to(losses, 1.0, window=2) == 6
    assert steps_to(losses, 0.5, window=2) is None


@given(losses=LOSSES, points=integers(1, 50))
def test_thinning_keeps_the_end_and_the_mean(losses, points):
    kept = thinned(losses, points)
    assert len(kept) == min(points, len(losses))
    assert kept[-1][0] == len(losses)
    widths = np.diff([0, *(step for step, _ in kept)])
    whole = sum(width * mean for width, (_, mean) in zip(widths, kept, strict=True))
    assert whole == pytest.approx(sum(losses), rel=1e-9, abs=1e-9)


def test_a_policy_is_compared_with_the_reference_of_the_same_seed():
    slow = [4.0] * 20 + [2.0] * 20
    fast = [4.0] * 10 + [2.0] * 30
    results = [ran("fp32", slow), ran("bf16", fast, evaluated=2.1, seconds=0.1)]
    found = quality_figures(results, REFERENCE)
    reference, narrow = found["rows"]
    assert reference["evaluated_relative"] == 0.0
    assert narrow["evaluated_relative"] == pytest.approx(0.05)
    # Ten steps make a window, and so the average is at 2 ten steps after the last 4.
    assert (reference["steps_to_loss"], narrow["steps_to_loss"]) == (30, 20)
    assert narrow["seconds_to_loss"] == pytest.approx(2.0)


def test_words_that_stand_for_infinity_are_numbers_again():
    found = quality_figures([ran("fp32", ["inf"] * 20)], REFERENCE)
    assert found["rows"][0]["train_loss"] == math.inf


def test_a_policy_without_a_reference_has_no_comparison():
    row = quality_figures([ran("bf16", [1.0] * 20)], REFERENCE)["rows"][0]
    assert (row["evaluated_relative"], row["steps_to_loss"]) == (None, None)
