"""What choosing may cost is a share of what was trained, and is kept to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.readout.budget import ChoosingBudget


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
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(RecipeError, match=r"above 0 and up to 1, e\.g\. 0\.01"):
        ChoosingBudget(share=share)
