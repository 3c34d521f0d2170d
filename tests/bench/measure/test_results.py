import pytest

from narrowcast.bench.contenders import Contender
from narrowcast.bench.coordinator import Result
from narrowcast.bench.measure.results import rows_of, timed_figures, who_took_part

BASELINE = Contender(name="base", kind="torch")


def turn(*seconds, tokens=100.0, peak=7):
    case = {"seconds": list(seconds), "peak_bytes": peak, "work": {"tokens": tokens}}
    return {"cases": {"step": case}, "loss": 1.5}


def contest():
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
    speeds = {row.name: row.speed for row in rows_of(contest(), baseline=BASELINE)}
    assert speeds == {"base": 1.0, "early": 2.0, "late": 4.0}


def test_rates_come_from_the_median():
    rows = {row.name: row for row in rows_of(contest(), baseline=BASELINE)}
    assert rows["early"].rates == {"tokens": pytest.approx(200.0)}
    assert rows["early"].peak_bytes == 3


def test_what_the_host_took_is_a_median_of_its_own_where_it_was_measured():
    apart = turn(0.5, 0.5)
    apart["cases"]["step"]["host_seconds"] = [0.1, 0.3, 0.2]
    base = Result(contender=BASELINE, rounds=[(0, apart)])
    together = Result(contender=Contender(name="together", kind="torch"), rounds=[(0, turn(1.0))])
    rows = timed_figures([base, together], BASELINE)["rows"]
    assert [row["host_ms"] for row in rows] == [200.0, None]
    assert [row["median_ms"] for row in rows] == [500.0, 1000.0]


def test_who_has_no_figures_has_a_reason_and_no_row():
    told = who_took_part(contest())
    assert told["failures"] == [{"name": "absent", "why": "not installed", "log": []}]
    names = [row["name"] for row in timed_figures(contest(), BASELINE)["rows"]]
    assert names == ["base", "early", "late"]


def test_without_the_baseline_s_figures_times_stand_alone():
    rows = rows_of(contest()[1:], baseline=BASELINE)
    assert [row.speed for row in rows] == [None, None]
