import pytest

from narrowcast.runs.shape import ANY, DEEPEST, misfit, unreadable

PLAN = {"modules": [{ANY: (str, int), "name": str}], "bytes": {ANY: int}}


@pytest.mark.parametrize(
    "value", [{}, {"modules": []}, {"modules": [{"name": "a", "n": 1}], "other": None}]
)
def test_what_has_the_shape_has_no_misfit(value):
    assert misfit(value, PLAN) is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "it is not a mapping"),
        ({"modules": {}}, "modules is not a list"),
        ({"modules": [{"name": 1}]}, "modules: entry 1: name is not text"),
        ({"modules": [{"kind": None}]}, "modules: entry 1: kind is not text or a whole number"),
        ({"bytes": {"params": True}}, "bytes: params is not a whole number"),
        ({"bytes": {"params": 1.0}}, "bytes: params is not a whole number"),
    ],
)
def test_the_first_thing_of_another_shape_is_told_with_its_place(value, told):
    assert misfit(value, PLAN) == told


def test_what_is_nested_too_deep_or_too_large_is_unreadable():
    deep: object = 1
    for _ in range(DEEPEST - 1):
        deep = [deep]
    assert unreadable(deep) is None
    assert unreadable([deep]) == f"it is nested more than {DEEPEST} levels deep"
    assert unreadable({"a": [2**63 - 1, -(2**62), True]}) is None
    assert unreadable({"a": [10**400]}) == "it has a whole number above 2**63"


def test_a_list_of_several_shapes_is_one_of_that_length():
    shape = [[str, int]]
    assert misfit([["a", 1], ["b", 2]], shape) is None
    assert misfit([["a", 1, 2]], shape) == "entry 1 is not a list of 2"
    assert misfit([["a", "b"]], shape) == "entry 1: entry 2 is not a whole number"
