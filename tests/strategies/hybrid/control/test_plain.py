import math
from dataclasses import dataclass

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.strategies.hybrid.control.plain import restored, usable


@dataclass(frozen=True)
class Pair:
    left: tuple[tuple[float, ...], ...]
    right: int


def test_what_cannot_be_squared_is_not_usable():
    assert [usable(x) for x in (0.0, -1e99, 1e101, math.inf, math.nan)] == [True] * 2 + [False] * 3


def test_lists_come_back_as_tuples_at_every_depth():
    assert restored(Pair, {"left": [[1.0], []], "right": 2}) == Pair(((1.0,), ()), 2)


@pytest.mark.parametrize("data", [{"left": []}, {"left": [], "right": 1, "other": 2}])
def test_data_of_another_version_is_refused(data):
    with pytest.raises(CheckpointError, match="the saved Pair has the fields"):
        restored(Pair, data)
