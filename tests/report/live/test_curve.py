import math

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, none, one_of

from narrowcast.report.live.live_data import Curve

VALUES = one_of(none(), floats(allow_nan=True, allow_infinity=True, width=32))


def points(curve):
    """Return step and value of every point of a curve, and the means of its buckets."""
    rows = curve.rows()
    return [(r[i], r[i + 1]) for r in rows for i in range(1, len(r), 2)], [r[0] for r in rows]


def filled(values, most):
    curve = Curve(most)
    for step, y in enumerate(values, start=1):
        curve.add(step, y)
    return curve


@given(values=lists(VALUES, max_size=300), half=integers(2, 20))
def test_a_curve_stays_small_and_keeps_its_ends_extremes_and_gaps(values, half):
    curve = filled(values, 2 * half)
    found, _ = points(curve)
    finite = [y for y in values if y is not None and math.isfinite(y)]
    assert len(curve) <= 2 * half
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    kept = [y for _, y in found if y is not None]
    if finite:
        assert (min(kept), max(kept)) == pytest.approx((min(finite), max(finite)), rel=1e-5)
    assert (None in [y for _, y in found]) == (len(finite) < len(values))
    if values:
        assert found[0][0] <= max(2, len(values) // half)
        assert found[-1][0] == len(values)


def test_a_short_curve_is_told_point_by_point():
    found, means = points(filled([3.0, 1.0, None], 10))
    assert found == [(1, 3.0), (2, 1.0), (3, None)]
    assert means == [3.0, 1.0, None]


@given(values=lists(VALUES, min_size=1, max_size=200), cuts=lists(integers(0, 200), max_size=5))
def test_telling_what_has_changed_gives_what_telling_all_gives(values, cuts):
    curve, told, epoch = Curve(16), [], 0
    for step, y in enumerate(values, start=1):
        curve.add(step, y)
        if step in cuts or step == len(values):
            at = max(0, len(told) - 1) if epoch == curve.epoch else 0
            told, epoch = told[:at] + curve.rows(at), curve.epoch
    assert told == curve.rows()


def test_means_that_no_float_holds_are_left_out():
    _, means = points(filled([1.7e308] * 64, 2))
    assert means[0] is None
