import math

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from

from narrowcast.runs import EvalRecord, Metric
from narrowcast.runs.improvement import Improvement, delta_in, measure_improvement

VALUES = lists(floats(-5, 5) | sampled_from([math.nan, math.inf, -math.inf]), max_size=40)


def after(values, *, better="lower", min_delta=0.0):
    records = [EvalRecord(step=10 * n, metrics={"m": v}) for n, v in enumerate(values, start=1)]
    return measure_improvement(records, metric=Metric(name="m", better=better), min_delta=min_delta)


@given(values=VALUES, better=sampled_from(["lower", "higher"]))
def test_the_best_is_the_first_of_the_best_finite_values(values, better):
    found = after(values, better=better)
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        assert math.isnan(found.best)
        assert found.best_step == 0
        return
    best = min(finite) if better == "lower" else max(finite)
    assert found.best == best
    assert found.best_step == 10 * (values.index(best) + 1)


@given(values=VALUES)
def test_without_a_least_difference_the_evaluations_since_the_best_are_counted(values):
    found = after(values)
    assert found.stalled == len(values) - found.best_step // 10


@given(values=lists(floats(-5, 5), min_size=1, max_size=40), patience=integers(1, 5))
def test_a_run_ends_where_the_same_rule_in_plain_words_ends_it(values, patience):
    """As Keras has it: `wait` begins anew where a value is below the mark by more than delta."""
    delta, mark, wait, expected = 0.5, math.inf, 0, None
    for n, value in enumerate(values, start=1):
        wait += 1
        if value < mark - delta:
            mark, wait = value, 0
        if wait >= patience:
            expected = n
            break
    metric = Metric(name="m")
    over = [
        n
        for n in range(1, len(values) + 1)
        if after(values[:n], min_delta=delta).why_over(metric=metric, patience=patience)
    ]
    assert (over[0] if over else None) == expected


def test_small_steps_that_add_up_to_enough_count():
    assert after([1.0, 0.96, 0.92], min_delta=0.1).stalled == 2
    assert after([1.0, 0.96, 0.92, 0.89], min_delta=0.1).stalled == 0


@pytest.mark.parametrize(("count", "said"), [(2, ""), (3, ""), (4, "m had not improved for 3")])
def test_it_says_why_a_run_is_over_and_nothing_before(count, said):
    found = after([1.0] * count)
    assert found.why_over(metric=Metric(name="m"), patience=3).startswith(said)
    assert bool(said) is bool(found.why_over(metric=Metric(name="m"), patience=3))


def test_without_patience_no_run_is_over():
    assert after([1.0] * 100).why_over(metric=Metric(name="m"), patience=0) == ""


def test_what_a_checkpoint_keeps_comes_back():
    found = after([3.0, 1.0, math.nan])
    assert Improvement(**found.to_json()) == found


@pytest.mark.parametrize(
    ("setting", "delta"), [(0.5, 0.5), (2, 2.0), (None, 0.0), ("0.5", 0.0), (10**400, 0.0)]
)
def test_a_file_may_say_anything(setting, delta):
    assert delta_in(setting) == delta
