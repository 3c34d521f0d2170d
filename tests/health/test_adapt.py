"""Adaptive precision, as laws: never below the policy, never too many modules, never too fast."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.health.adapt import WIDER, Adaptation, Limits

RANK = {"e4m3": 0, "fp16": 0, "bf16": 1, "fp32": 2}
MODULES = ["a", "b", "c", "d", "e", "f", "g", "h"]


def adapting(form="e4m3", **limits):
    return Adaptation(dict.fromkeys(MODULES, form), Limits(**limits))


def saturating(*modules):
    return {("saturation", module, "input") for module in modules}


def test_trouble_raises_one_format_at_a_time_and_calm_lowers_it_again():
    adaptation = adapting(cooldown=10, calm=50)
    (move,) = adaptation.decide(saturating("a"), step=100)
    assert move == ("a", "e4m3", "bf16", "its input saturates")
    assert adaptation.overrides == {"a": "bf16"}
    assert adaptation.decide(saturating("a"), step=105) == []  # too soon
    (move,) = adaptation.decide(saturating("a"), step=110)
    assert move[:3] == ("a", "bf16", "fp32")
    assert adaptation.decide(saturating("a"), step=200) == []  # nothing is wider
    assert adaptation.decide(set(), step=249) == []
    (move,) = adaptation.decide(set(), step=250)
    assert move == ("a", "fp32", "bf16", "calm for 50 steps")
    (move,) = adaptation.decide(set(), step=300)
    assert move[:3] == ("a", "bf16", "e4m3")
    assert adaptation.overrides == {}


def test_calm_counts_from_when_the_narrower_format_would_hold_what_is_seen():
    adaptation = adapting("fp16", cooldown=1, calm=50)
    overflowing = {("overflow", "a", "input")}
    adaptation.decide(overflowing, step=1)
    adaptation.decide(overflowing, step=5)
    assert adaptation.overrides == {"a": "fp32"}
    # From fp32 to bf16 it goes whatever fp16 would do, and from there it does not.
    (move,) = adaptation.decide(set(), step=60, unsafe_to_lower=["a"])
    assert move[:3] == ("a", "fp32", "bf16")
    for step in range(70, 200, 10):
        assert adaptation.decide(set(), step=step, unsafe_to_lower=["a"]) == []
    again = adapting("fp16", cooldown=1, calm=50)
    again.load_state_dict(json.loads(json.dumps(adaptation.state_dict())))
    for each in (adaptation, again):
        assert each.decide(set(), step=239) == []
        (move,) = each.decide(set(), step=240)
        assert move == ("a", "bf16", "fp16", "calm for 50 steps")


@pytest.mark.parametrize(("kind", "moves"), [("overflow", 1), ("vanishing", 1), ("drift", 0)])
def test_only_troubles_that_a_wider_format_helps_against_change_anything(kind, moves):
    assert len(adapting("fp16").decide({(kind, "a", "grad_output")}, step=1)) == moves


def test_no_more_than_a_share_of_the_modules_is_raised_at_once():
    adaptation = adapting(most=0.25)
    moves = adaptation.decide(saturating(*MODULES), step=1)
    assert len(moves) == len(adaptation.overrides) == 2
    assert len(adapting(most=0.0).decide(saturating(*MODULES), step=1)) == 1


def test_modules_that_the_policy_does_not_know_are_left_alone():
    assert adapting().decide(saturating("unknown"), step=1) == []
    assert adapting("fp32").decide(saturating("a"), step=1) == []


@settings(max_examples=60)
@given(
    course=st.lists(st.sets(st.sampled_from(MODULES)), max_size=60),
    form=st.sampled_from(["e4m3", "fp16", "bf16"]),
    cooldown=st.integers(1, 40),
    calm=st.integers(1, 40),
    stop=st.integers(0, 60),
)
def test_whatever_happens_formats_stay_within_their_limits(course, form, cooldown, calm, stop):
    adaptation = adapting(form, most=0.5, cooldown=cooldown, calm=calm)
    again = adapting(form, most=0.5, cooldown=cooldown, calm=calm)
    now, changed = dict.fromkeys(MODULES, form), {}
    for i, modules in enumerate(course):
        step = 7 * i
        issues = saturating(*sorted(modules))
        if i == stop:  # a resumed run decides the same
            again.load_state_dict(json.loads(json.dumps(adaptation.state_dict())))
        moves = adaptation.decide(sorted(issues), step=step)
        if i >= stop:
            assert again.decide(sorted(issues), step=step) == moves
        for module, before, after, _ in moves:
            assert now[module] == before
            assert abs(RANK[after] - RANK[before]) == 1
            assert step - changed.get(module, -1000) >= cooldown
            now[module], changed[module] = after, step
        assert {m: f for m, f in now.items() if f != form} == adaptation.overrides
        assert all(RANK[f] >= RANK[form] for f in now.values())
        assert len(adaptation.overrides) <= 4


def test_every_format_ends_at_fp32():
    for form in WIDER:
        while form in WIDER:
            form = WIDER[form]
        assert form == "fp32"


def test_what_was_seen_before_a_change_decides_no_other():
    adaptation = adapting(cooldown=1)
    (move,) = adaptation.decide(saturating("a"), seen=9, step=10)
    assert move.after == "bf16"
    assert adaptation.decide(saturating("a"), seen=10, step=11) == []  # still of the old format
    (move,) = adaptation.decide(saturating("a"), seen=11, step=12)
    assert move.after == "fp32"
