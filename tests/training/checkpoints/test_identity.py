import copy
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.training.checkpoints.verify import first_difference

states = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.floats(width=32), max_size=4).map(lambda v: torch.tensor(v)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(state=states)
def test_a_copy_is_the_same(state):
    assert first_difference(state, copy.deepcopy(state)) is None


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (1, 1.0, "x: a int and a float"),
        (0.0, -0.0, "x: 0.0 and -0.0"),
        ([1], [1, 2], "x: 1 items and 2 items"),
        ({"a": 1}, {}, "x: only one of the two has 'a'"),
        ({"a": [0, 1]}, {"a": [0, 2]}, "x/a/1: 1 and 2"),
        (torch.zeros(2), torch.zeros(3), r"x: torch.float32 of \(2,\) and torch.float32 of \(3,\)"),
        (torch.zeros(2), torch.zeros(2).double(), "x: torch.float32 of .* and torch.float64"),
        (torch.zeros(3), torch.tensor([0.0, -0.0, 1.0]), "x: 2 of 3 values differ, the first at 1"),
        (
            torch.tensor(1.0),
            torch.tensor(2.0),
            "x: 1 of 1 values differ, the first at 0: 1.0 and 2",
        ),
        (torch.tensor([True]), torch.tensor([False]), "x: 1 of 1 values differ"),
        (
            torch.tensor([1.0, 2.0]).to(torch.bfloat16),
            torch.tensor([1.0, 2.5]).to(torch.bfloat16),
            "the first at 1: 2.0 and 2.5",
        ),
    ],
)
def test_the_first_difference_is_named(a, b, said):
    found = first_difference(a, b, where="x")
    assert found is not None
    assert re.search(said, found)


def test_a_nan_is_the_same_as_itself():
    assert first_difference({"x": math.nan}, {"x": math.nan}) is None
    assert first_difference(torch.tensor(math.nan), torch.tensor(math.nan)) is None


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_equal_tensors_of_any_shape_are_the_same(shape):
    assert first_difference(torch.ones(shape), torch.ones(shape)) is None
