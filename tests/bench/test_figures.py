import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists

from narrowcast.bench.contenders import Contender
from narrowcast.bench.figures import Result, quantile, result_rows

BASELINE = Contender(name="base", kind="torch")


def turn(*seconds, peak=7):
    return {"seconds": seconds, "peak_bytes": peak, "work": {"tokens": 100.0}, "loss": 1.5}


def results():
    base = Result(contender=BASELINE)
    # The machine was twice as slow in the second group.
    base.rounds = [(0, turn(1.0, 1.0)), (1, turn(2.0, 2.0))]
    early = Result(contender=Contender(name="early", kind="torch"))
    early.rounds = [(0, turn(0.5, 0.5, peak=3))]
    late = Result(contender=Contender(name="late", kind="torch"))
    late.rounds = [(1, turn(0.5, 0.5))]
    absent = Result(contender=Contender(name="absent", kind="torch"), failure="not installed")
    return [base, early, late, absent]


def test_a_ratio_is_against_the_baseline_of_the_same_rounds():
    speeds = {row.name: row.speed for row in result_rows(results(), baseline=BASELINE)}
    assert speeds == {"base": 1.0, "early": 2.0, "late": 4.0}


def test_rates_come_from_the_median():
    rows = {row.name: row for row in result_rows(results(), baseline=BASELINE)}
    assert rows["early"].rates == {"tokens": pytest.approx(200.0)}
    assert rows["early"].peak_bytes == 3


def test_without_the_baseline_s_figures_times_stand_alone():
    rows = result_rows(results()[1:], baseline=BASELINE)
    assert [row.speed for row in rows] == [None, None]


@given(seconds=lists(floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=60))
def test_quartiles_are_numpys(seconds):
    quartiles = [quantile(seconds, share) for share in (0.25, 0.75)]
    # Interpolation is one multiplication and one addition, in either order.
    assert quartiles == pytest.approx(np.percentile(seconds, [25, 75]), rel=1e-12)
