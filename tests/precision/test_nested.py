"""Tensors inside tuples, lists and dicts: what a batch may be."""

from collections import UserDict, namedtuple

import pytest
import torch

from narrowcast.precision.nested import (
    cast_arguments,
    copy_tensors,
    map_tensors,
    outline,
    tensors_in,
)

Pair = namedtuple("Pair", ["x", "y"])


def batch(seed):
    def numbers(*shape):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator)

    return {
        "x": numbers(2, 3),
        "more": [numbers(4), (numbers(1), Pair(numbers(2), numbers(3)))],
        "kind": "train",
        "user": UserDict(a=numbers(5)),
    }


def test_a_copy_shares_no_memory_and_has_every_value_and_type():
    given = batch(0)
    copied = map_tensors(given, torch.clone)
    assert isinstance(copied["more"][1][1], Pair)
    assert isinstance(copied["user"], UserDict)
    pairs = list(zip(tensors_in(given), tensors_in(copied), strict=True))
    assert len(pairs) == 6
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


def test_values_are_written_by_name_whatever_the_order_of_the_names():
    into, source = map_tensors(batch(0), torch.clone), batch(1)
    before = [t.data_ptr() for t in tensors_in(into)]
    copy_tensors(into, dict(reversed(source.items())))
    assert [t.data_ptr() for t in tensors_in(into)] == before
    for mine, given in zip(tensors_in(into), tensors_in(source), strict=True):
        assert torch.equal(mine, given)


def test_batches_of_other_values_have_the_same_outline():
    assert outline(batch(0)) == outline(batch(1))


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(2, 4)},
        {"x": torch.zeros(2, 3, dtype=torch.bfloat16)},
        {"kind": "eval"},
        {"another": torch.zeros(1)},
        {"more": []},
    ],
    ids=["shape", "dtype", "a plain value", "one more", "one less"],
)
def test_batches_that_are_built_otherwise_have_another_outline(change):
    assert outline({**batch(0), **change}) != outline(batch(0))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(2),), {}),
        ((torch.ones(2, dtype=torch.bfloat16),), {}),
        ((torch.ones(2, dtype=torch.int64),), {}),
        (([torch.ones(2)],), {}),
        ((torch.ones(2), torch.ones(3, dtype=torch.int64)), {"x": torch.ones(4)}),
        ((), {"x": Pair(torch.ones(2), "text")}),
    ],
)
def test_arguments_are_cast_as_any_value_is_and_only_where_they_must_be(args, kwargs):
    found, expected = (
        cast_arguments(args, kwargs, torch.bfloat16),
        map_tensors((args, kwargs), lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t),
    )
    assert outline(found) == outline(expected)
    for before, after in zip(tensors_in((args, kwargs)), tensors_in(found), strict=True):
        assert (after is before) == (before.dtype != torch.float32)
