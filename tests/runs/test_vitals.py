import math

import pytest

from narrowcast.runs import EvalRecord, FindingRecord, StepRecord
from narrowcast.runs.vitals import WEIGHTS_NOT_FINITE, Vitals, measure_vitals


def step(number, *, applied=True):
    return StepRecord(
        step=number,
        loss=1.0,
        loss_scale=1.0,
        applied=applied,
        skip_reason="",
        grad_norm=1.0,
        lr=0.1,
        lost_updates=None,
        items=1,
        seconds=0.1,
        peak_bytes=0,
    )


def weights(number):
    return FindingRecord(
        step=number,
        since=number,
        module="",
        role="weight",
        what=WEIGHTS_NOT_FINITE,
        why="2 of 3 weights are not finite, the first a",
        action="",
        advice="",
    )


def evaluated(number, error=0.5, **others):
    return EvalRecord(step=number, metrics={"error": error, **others})


def steps(applied, skipped):
    return [step(n, applied=n <= applied) for n in range(1, applied + skipped + 1)]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([*steps(5, 0), evaluated(5)], ""),
        ([*steps(5, 9), evaluated(14)], ""),
        ([*steps(5, 10), evaluated(15)], "the last 10 of its 15 steps were skipped"),
        ([*steps(0, 3), evaluated(3)], "none of its 3 steps was applied"),
        ([*steps(5, 0), evaluated(5, math.nan)], "its last evaluated error is nan"),
        ([*steps(5, 0), evaluated(5, -math.inf)], "its last evaluated error is -inf"),
        # Another metric may be undefined, as a correlation of equal numbers is.
        ([*steps(5, 0), evaluated(5, correlation=math.nan)], ""),
        ([*steps(5, 0), evaluated(5), weights(5)], "2 of 3 weights are not finite, the first a"),
        # What was so once, and is no more.
        ([*steps(5, 0), evaluated(3, math.nan), weights(3), evaluated(5)], ""),
    ],
)
def test_what_a_run_dies_of_is_said(records, said):
    assert measure_vitals(records, headline="error").diverged == said


def test_all_that_is_wrong_is_said_and_survives_a_checkpoint():
    found = measure_vitals([*steps(0, 12), evaluated(12, math.nan), weights(12)], headline="error")
    assert Vitals(**found.to_json()) == found
    assert found.diverged == (
        "2 of 3 weights are not finite, the first a; its last evaluated error is nan; "
        "none of its 12 steps was applied"
    )
