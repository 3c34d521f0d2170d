from dataclasses import asdict
from itertools import pairwise

from hypothesis import given
from hypothesis.strategies import booleans, integers, lists

from narrowcast.health.adapt import Ladder

LIMITS = {"limit": 3, "calm": 4, "top": 2}


def walked(steps, **limits):
    """The rung in force in each step, with every move carried out as a run does."""
    ladder, found = Ladder(), []
    for step, applied in enumerate(steps, start=1):
        found.append(ladder.rung)
        ladder = ladder.after(step, applied=applied, **{**LIMITS, **limits})
        if ladder.is_due(step):
            ladder = ladder.moved(step)
    return found


def test_overflows_in_a_row_lead_up_one_step_later_than_they_could():
    assert walked([False] * 9) == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_overflows_with_a_good_step_between_them_lead_nowhere():
    assert set(walked([False, False, True] * 10)) == {0}


def test_a_calm_leads_down_one_at_a_time():
    assert walked([False] * 8 + [True] * 12) == [0] * 4 + [1] * 4 + [2] * 5 + [1] * 5 + [0] * 2


def test_an_overflow_begins_the_calm_again():
    assert walked([False] * 4 + [True, True, True, False] * 5)[4:] == [1] * 20


def test_a_limit_without_a_wider_format_leads_nowhere():
    assert set(walked([False] * 50, top=0)) == {0}


@given(steps=lists(booleans(), max_size=200), limit=integers(1, 6), calm=integers(1, 6))
def test_it_stays_between_its_ends_and_moves_by_one(steps, limit, calm):
    rungs = walked(steps, limit=limit, calm=calm)
    assert all(0 <= rung <= 2 for rung in rungs)
    assert all(abs(a - b) <= 1 for a, b in pairwise(rungs))


def test_a_record_of_the_formats_before_does_not_count():
    ladder = Ladder(rung=1, since=10)
    assert ladder.after(9, applied=False, **LIMITS) == ladder
    assert ladder.after(10, applied=False, **LIMITS).overflows == 1


def test_it_is_plain_data_in_a_checkpoint():
    ladder = Ladder().after(1, applied=False, **LIMITS)
    assert Ladder(**asdict(ladder)) == ladder
