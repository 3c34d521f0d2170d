"""Passes over held-out data cost no more than their share of the run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.strategies.hybrid.jumper import JumpAccount
from narrowcast.strategies.hybrid.readout.choice import ChoosingBudget


def test_a_hundredth_of_six_hundred_steps_is_eighteen_forward_passes():
    budget = ChoosingBudget()
    assert budget.left(600) == pytest.approx(18)
    assert budget.left(600, part=0.5) == pytest.approx(9)
    assert budget.after_spending(7).left(600) == pytest.approx(11)


@given(
    share=st.floats(0.001, 1),
    choices=st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1), st.floats(0, 1)), max_size=20),
)
def test_whoever_spends_no_more_than_is_left_spends_no_more_than_the_share(share, choices):
    budget, steps = ChoosingBudget(share=share), 0
    for more, part, used in choices:
        steps += more
        budget = budget.after_spending(used * budget.left(steps, part=part))
    assert budget.spent <= 3 * share * steps * (1 + 20 * 2**-52)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan")])
def test_a_share_outside_0_to_1_raises(share):
    with pytest.raises(ConfigError, match="readout_budget"):
        ChoosingBudget(share=share)


def account(*, accepted, rejected):
    jumps = JumpAccount()
    for kept in [True] * accepted + [False] * rejected:
        jumps = jumps.after_window(cost=33, accepted=kept)
    return jumps


def test_confidence_is_a_half_at_first_and_then_follows_the_acceptance_rate():
    assert JumpAccount().confidence == 0.5
    assert account(accepted=3, rejected=0).confidence == 0.8
    assert account(accepted=20, rejected=60).confidence == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("accepted", "rejected", "confident"),
    [(0, 0, True), (0, 2, True), (0, 3, False), (2, 1, True), (9, 1, True), (10, 30, False)],
)
def test_jumps_are_tried_while_the_rate_can_still_reach_the_threshold(
    accepted, rejected, confident
):
    assert account(accepted=accepted, rejected=rejected).is_confident(0.75) == confident


def test_an_accepted_jump_ends_a_row_of_rejections():
    jumps = account(accepted=1, rejected=2)
    assert (jumps.tried, jumps.accepted, jumps.rejections, jumps.spent) == (3, 1, 2, 99)
    assert jumps.wasted == 66
    assert jumps.after_window(cost=1, accepted=True).rejections == 0
    assert JumpAccount(**jumps.to_json()) == jumps
