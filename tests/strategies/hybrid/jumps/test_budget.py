"""Jumps never cost more than their share, and end where none is accepted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.budget import JumpBudget


@given(
    costs=st.lists(st.tuples(st.integers(0, 500), st.floats(0, 50)), max_size=60),
    share=st.floats(0, 0.1),
)
def test_what_is_tried_where_it_may_be_stays_within_the_share(costs, share):
    budget = JumpBudget(share=share)
    for steps, cost in costs:
        budget = budget.after_steps(steps)
        if budget.may_try(cost):
            budget = budget.after_spending(cost)
        assert budget.spent <= share * budget.trained * (1 + 1e-12)


def test_one_part_in_a_hundred_is_the_default():
    budget = JumpBudget().after_steps(1000)
    assert budget.may_try(30)
    assert not budget.may_try(31)


def test_a_planned_run_can_be_spent_from_the_beginning():
    assert JumpBudget(planned=10_000).may_try(100)


def test_rejections_in_a_row_switch_it_off_and_an_acceptance_counts_anew():
    budget = JumpBudget(planned=1e6, most_rejections=2)
    for accepted in (False, True, False):
        budget = budget.after_jump(accepted=accepted)
    assert budget.may_try(1)
    budget = budget.after_jump(accepted=False)
    assert not budget.may_try(0)
    assert budget.refusal(0) == "2 jumps in a row were rejected, and no more are tried"
    assert (budget.tried, budget.accepted) == (4, 1)


def test_a_refusal_says_what_is_left():
    assert "cost 40 forward passes, and 30 are left" in JumpBudget().after_steps(1000).refusal(40)
    assert JumpBudget().after_steps(1000).refusal(30) == ""


def test_a_budget_survives_json():
    budget = JumpBudget(share=0.02).after_steps(10).after_spending(0.1).after_jump(accepted=False)
    account = json.loads(json.dumps(budget.state_dict()))
    assert JumpBudget(share=0.02).restored(account) == budget


@pytest.mark.parametrize("wrong", [{"share": -0.1}, {"share": 2}, {"most_rejections": 0}])
def test_a_senseless_budget_is_refused(wrong):
    with pytest.raises(RecipeError, match="write a share from 0 to 1"):
        JumpBudget(**wrong)


def test_lessons_leave_half_of_it():
    budget = JumpBudget(planned=1000)
    for _ in range(9):
        if budget.may_teach(1):
            budget = budget.after_lesson(1)
    assert (budget.taught, budget.left) == (5, 5)
