import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.judge.forgetting import Accuracies

HUNDREDTHS = st.integers(0, 100).map(lambda n: Fraction(n, 100))


@st.composite
def exact(draw):
    """A matrix of hundredths, and baselines."""
    count = draw(st.integers(2, 6))
    row = st.lists(HUNDREDTHS, min_size=count, max_size=count)
    return draw(st.lists(row, min_size=count, max_size=count)), draw(row)


@given(exact())
def test_the_measures_are_those_of_exact_fractions(drawn):
    a, alone = drawn
    found = Accuracies(
        matrix=tuple(tuple(map(float, row)) for row in a), baselines=tuple(map(float, alone))
    )
    last = len(a) - 1
    average = sum(a[last], Fraction()) / len(a)
    backward = sum((a[last][t] - a[t][t] for t in range(last)), Fraction()) / last
    forward = sum((a[t][t] - alone[t] for t in range(1, len(a))), Fraction()) / last
    told = (found.average, found.backward_transfer, found.forward_transfer)
    assert told == pytest.approx((float(average), float(backward), float(forward)), abs=1e-15)


def test_a_single_task_has_nothing_to_transfer():
    found = Accuracies(matrix=((0.5,),), baselines=(0.4,))
    assert found.average == 0.5
    assert math.isnan(found.backward_transfer)
    assert math.isnan(found.forward_transfer)


def test_what_is_no_matrix_and_baselines_that_are_missing_are_refused():
    with pytest.raises(ConfigError, match="must have one row per learnt task"):
        Accuracies(matrix=((0.5, 0.5),))
    with pytest.raises(ConfigError, match="must be one per task or none"):
        Accuracies(matrix=((0.5,),), baselines=(0.1, 0.2))
    with pytest.raises(ConfigError, match="needs baselines"):
        Accuracies(matrix=((0.5,),)).forward_transfer  # noqa: B018
