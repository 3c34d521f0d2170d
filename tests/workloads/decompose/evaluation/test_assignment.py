"""The assignment worth most, against scipy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from narrowcast.workloads.decompose.evaluation.toy_table import best_assignment


def worth_of(worth, columns):
    rows = np.flatnonzero(columns >= 0)
    return worth[rows, columns[rows]].sum()


@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    steps=st.sampled_from([1, 3, 1000]),
)
def test_no_assignment_is_worth_more(rows, columns, seed, steps):
    # Few distinct values make ties, which is where such methods go wrong.
    worth = np.random.default_rng(seed).integers(0, steps + 1, (rows, columns)) / steps
    ours = best_assignment(worth)
    given = ours[ours >= 0]
    assert len(set(given)) == len(given) == min(rows, columns)
    expected = worth[linear_sum_assignment(worth, maximize=True)].sum()
    assert worth_of(worth, ours) == pytest.approx(expected, abs=1e-12)


def test_a_hundred_features_among_four_hundred_components():
    worth = np.random.default_rng(0).random((100, 400))
    expected = worth[linear_sum_assignment(worth, maximize=True)].sum()
    assert worth_of(worth, best_assignment(worth)) == pytest.approx(expected, abs=1e-9)
