import math

import pytest

from narrowcast.report.live.events import (
    LONGEST_TEXT,
    MOST_EVENTS,
    MOST_MARKS,
    Changes,
    Events,
    Skips,
)
from narrowcast.runs import FindingRecord, PrecisionRecord, StrategyRecord


def finding(number, module="a", **changes):
    texts = {"role": "input", "what": "overflow", "why": f"amax {number}", "action": "none"}
    return FindingRecord(step=number, module=module, since=1, advice="", **{**texts, **changes})


def change(number, module="a"):
    return PrecisionRecord(step=number, module=module, before="e4m3", after="bf16", reason="spoke")


def test_skips_in_a_row_for_one_reason_are_one_row(step):
    skips = Skips()
    for number, why in [(4, "inf"), (5, "inf"), (6, "nan"), (8, "nan")]:
        skips.add(step(number, applied=False, skip_reason=why))
    assert [row[:3] for row in skips.rows()] == [[4, 5, 2], [6, 6, 1], [8, 8, 1]]


def test_any_number_of_skips_is_counted_in_a_bounded_number_of_rows(step):
    skips = Skips()
    for number in range(1, 9 * MOST_MARKS, 3):
        skips.add(step(number, applied=False, skip_reason="inf"))
    assert len(skips.rows()) <= MOST_MARKS
    assert sum(row[2] for row in skips.rows()) == 3 * MOST_MARKS
    assert skips.rows()[0][0] == 1


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_scale_that_is_no_number_is_told_as_none(step, scale):
    skips = Skips()
    skips.add(step(1, applied=False, loss_scale=scale))
    assert skips.rows()[0][3] is None


def test_a_finding_that_comes_again_moves_up_and_is_counted():
    events = Events()
    for record in (finding(1), finding(2, "b"), finding(3)):
        events.add(record)
    rows = events.since(0)
    assert [(r["module"], r["first"], r["last"], r["times"]) for r in rows] == [
        ("b", 2, 2, 1),
        ("a", 1, 3, 2),
    ]
    assert rows[1]["why"] == "amax 3"
    assert [r["module"] for r in events.since(2)] == ["a"]


def test_a_feed_keeps_the_newest_and_counts_all():
    events = Events()
    for number in range(1, 3 * MOST_EVENTS):
        events.add(finding(number, f"m{number}"))
    assert len(events.since(0)) == MOST_EVENTS
    assert events.findings == 3 * MOST_EVENTS - 1
    assert events.since(0)[-1]["module"] == f"m{3 * MOST_EVENTS - 1}"


def test_every_change_of_format_has_its_entry():
    events = Events()
    for number in (5, 9):
        events.add(change(number))
    assert [(r["kind"], r["first"], r["after"]) for r in events.since(0)] == [
        ("format", 5, "bf16"),
        ("format", 9, "bf16"),
    ]


def test_changes_at_one_step_are_one_mark():
    changes = Changes()
    for record in (change(5, "a"), change(5, "b"), change(9, "c")):
        changes.add(record)
    assert [row[:2] for row in changes.rows()] == [[5, 2], [9, 1]]


def test_texts_of_any_length_are_shown_shortened():
    events = Events()
    events.add(finding(1, "m" * 100_000, why="w" * 100_000))
    assert max(len(str(text)) for text in events.since(0)[0].values()) == LONGEST_TEXT


@pytest.mark.parametrize(("module", "named"), [("*", "all"), ("", "all"), ("head", "head")])
def test_a_change_of_the_whole_model_is_said_to_be_of_all(module, named):
    events, changes = Events(), Changes()
    events.add(change(1, module))
    changes.add(change(1, module))
    assert events.since(0)[0]["module"] == named
    assert changes.rows() == [[1, 1, f"{named} e4m3 → bf16"]]


def test_what_a_strategy_does_is_an_event_of_its_own():
    events = Events()
    for step, what in ((10, "full begins"), (20, "line, 4 steps: rejected")):
        events.add(
            StrategyRecord(step=step, phase="full", event="phase", what=what, why="so it is",
                           values={}, seconds=0.0)
        )  # fmt: skip
    rows = events.since(0)
    assert [(row["kind"], row["text"], row["first"]) for row in rows] == [
        ("strategy", "full begins", 10), ("strategy", "line, 4 steps: rejected", 20)
    ]  # fmt: skip
    assert events.findings == events.changes == 0
