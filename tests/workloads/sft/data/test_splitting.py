import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.prepare import rows_in_both, split_rows
from narrowcast.workloads.sft.data.tokenised import TokenRows


def rows_of(*numbers):
    return TokenRows.joined(
        [(np.array([n, 1], np.int32), np.array([False, True])) for n in numbers]
    )


def said(rows):
    return [int(rows.row(number)[0][0]) for number in range(len(rows))]


def test_the_share_is_kept_and_spread_over_the_file():
    train, held = split_rows(rows_of(*range(1000)), 0.1, seed=0)
    assert (len(train), len(held)) == (900, 100)
    assert sorted(said(train) + said(held)) == list(range(1000))
    # Of the last tenth about a tenth: 10 expected, with a standard deviation of 3.
    assert 1 <= sum(number >= 900 for number in said(held)) <= 25


def test_the_seed_draws_and_the_same_seed_draws_the_same():
    rows = rows_of(*range(100))
    first, again, other = (split_rows(rows, 0.2, seed=seed)[1] for seed in (1, 1, 2))
    assert said(first) == said(again) != said(other)


@given(numbers=st.lists(st.integers(0, 30), max_size=60), share=st.floats(0.01, 0.99))
def test_what_says_the_same_is_on_one_side(numbers, share):
    if len(set(numbers)) < 2:
        with pytest.raises(ConfigError, match=r"data.validation_split=0 to train without"):
            split_rows(rows_of(*numbers), share, seed=0)
        return
    train, held = split_rows(rows_of(*numbers), share, seed=0)
    assert len(train)
    assert len(held)
    assert not set(said(train)) & set(said(held))
    assert rows_in_both(train, held) == 0
    assert len(train) + len(held) == len(numbers)


def test_no_share_is_no_validation():
    rows = rows_of(1)
    assert split_rows(rows, 0, seed=0) == (rows, None)


def test_rows_in_both_are_counted():
    assert rows_in_both(rows_of(1, 2, 3), rows_of(3, 4, 3)) == 2
