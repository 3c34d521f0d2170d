import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import booleans, floats, integers, lists, none, one_of, sampled_from

from narrowcast.report.charts.series import (
    Series,
    changes,
    drawn,
    series,
    skip_marks,
    smoothed,
    smoothing_window,
    thinned,
)

losses = lists(one_of(floats(), none()), min_size=61, max_size=300)


def numbered(values):
    return series(range(1, len(values) + 1), values)


@given(values=losses, most=integers(8, 60))
def test_thinning_keeps_both_ends_and_the_extremes_within_the_limit(values, most):
    whole = numbered(values)
    few = thinned(whole, most)
    assert len(few.steps) <= most
    assert (few.steps[0], few.steps[-1]) == (whole.steps[0], whole.steps[-1])
    assert set(zip(few.steps, few.values, strict=True)) <= set(
        zip(whole.steps, whole.values, strict=True)
    )
    assert list(few.steps) == sorted(few.steps)
    if whole.finite:
        assert (min(few.finite), max(few.finite)) == (min(whole.finite), max(whole.finite))


@given(gap=integers(0, 9999))
def test_a_single_step_that_is_not_finite_is_still_a_gap_after_thinning(gap):
    values = [1.0] * 10_000
    values[gap] = math.nan
    few = thinned(numbered(values), 2000)
    assert (gap + 1, None) in zip(few.steps, few.values, strict=True)


def test_each_stretch_keeps_its_own_spike():
    values = [1.0] * 9000
    spikes = range(50, 9000, 100)
    for i in spikes:
        values[i] = 5.0
    few = thinned(numbered(values), 2000)
    assert {i + 1 for i in spikes} <= set(few.steps)


def test_what_is_short_enough_is_left_alone():
    whole = numbered([3.0, math.inf, 1.0])
    assert thinned(whole, 3) == whole == Series(steps=(1, 2, 3), values=(3.0, None, 1.0))


@given(values=lists(floats(-1e6, 1e6), min_size=30, max_size=300), half=integers(1, 7))
def test_the_smooth_curve_is_the_centred_median(values, half):
    curve = smoothed(numbered(values), 2 * half + 1)
    windows = np.lib.stride_tricks.sliding_window_view(np.array(values), 2 * half + 1)
    np.testing.assert_allclose(curve.values[half:-half], np.median(windows, axis=1))
    assert curve.values[0] == values[0]


def test_the_smooth_curve_passes_over_gaps_and_stops_where_nothing_is_finite():
    curve = smoothed(numbered([1.0, math.nan, 3.0, math.nan, math.nan, math.nan]), 3)
    assert curve.values == (1.0, 2.0, 3.0, 3.0, None, None)


@given(integers(1, 10**6))
def test_the_window_is_odd_and_no_longer_than_the_run(n):
    assert smoothing_window(n) % 2 == 1
    assert smoothing_window(n) <= n


@given(lists(sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=100))
def test_the_corners_of_a_stair_rebuild_it(values):
    corners = changes(numbered(values))
    found = dict(zip(corners.steps, corners.values, strict=True))
    rebuilt = []
    for number in range(1, len(values) + 1):
        rebuilt.append(found.get(number, rebuilt[-1] if rebuilt else None))
    assert rebuilt == values


@given(
    history=lists(booleans(), max_size=200),
    whys=lists(sampled_from(["inf", "nan"]), min_size=200, max_size=200),
)
def test_the_marks_cover_every_skipped_step_and_no_other(history, whys, step):
    records = [
        step(n, applied=applied, skip_reason="" if applied else whys[n])
        for n, applied in enumerate(history)
    ]
    marks = skip_marks(records)
    covered = [(n, mark.why) for mark in marks for n in range(mark.first, mark.last + 1)]
    assert covered == [(r.step, r.skip_reason) for r in records if not r.applied]


def test_neighbours_with_the_same_reason_are_one_mark(step):
    records = [step(n, applied=False, skip_reason="inf") for n in (4, 5, 6)]
    (mark,) = skip_marks(records)
    assert (mark.first, mark.last, mark.steps) == (4, 6, 3)


def test_neighbours_at_different_scales_stay_apart(step):
    records = [step(n, applied=False, skip_reason="inf", loss_scale=2.0**-n) for n in (4, 5, 6)]
    assert [mark.loss_scale for mark in skip_marks(records)] == [2.0**-4, 2.0**-5, 2.0**-6]


@pytest.mark.parametrize("n", [0, 1, 5000, 5001, 20_000])
def test_at_most_5000_marks_are_drawn_and_they_stand_for_every_skipped_step(n, step):
    marks = skip_marks([step(2 * k, applied=False, skip_reason="inf") for k in range(n)])
    chosen = drawn(marks)
    assert len(chosen) == min(n, 5000)
    assert sum(mark.steps for mark in chosen) == n
    assert [mark.first for mark in chosen[:1]] == [mark.first for mark in marks[:1]]
    assert [mark.last for mark in chosen[-1:]] == [mark.last for mark in marks[-1:]]
