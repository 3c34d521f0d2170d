import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.tuning.search import Cost, pareto_front

# Whole numbers add up exactly, so both searches see the same sums.
costs = st.builds(
    Cost,
    seconds=st.integers(0, 40).map(float),
    loss=st.integers(0, 40).map(float),
    bytes=st.integers(0, 40).map(float),
)
problems = st.lists(st.lists(costs, min_size=1, max_size=3), min_size=1, max_size=7)


def every_policy(groups):
    for chosen in itertools.product(*(range(len(group)) for group in groups)):
        picked = [group[i] for group, i in zip(groups, chosen, strict=True)]
        yield (
            sum(cost.seconds for cost in picked),
            sum(cost.loss for cost in picked),
            sum(cost.bytes for cost in picked),
        )


@settings(max_examples=60)
@given(groups=problems, share=st.floats(0, 1), by_memory=st.booleans())
def test_the_fastest_policy_is_that_of_brute_force(groups, share, by_memory):
    most_loss = share * sum(max(cost.loss for cost in group) for group in groups)
    most_bytes = (
        share * sum(max(cost.bytes for cost in group) for group in groups)
        if by_memory
        else math.inf
    )
    front = pareto_front(groups, most_loss=most_loss, most_bytes=most_bytes)
    allowed = [
        (seconds, loss)
        for seconds, loss, taken in every_policy(groups)
        if loss <= most_loss and taken <= most_bytes
    ]
    assert bool(front) == bool(allowed)
    if allowed:
        fastest = min(front, key=lambda point: (point.seconds, point.loss))
        assert (fastest.seconds, fastest.loss) == min(allowed)
        least = min(front, key=lambda point: (point.loss, point.seconds))
        assert (least.loss, least.seconds) == min((loss, seconds) for seconds, loss in allowed)


@settings(max_examples=10)
@given(groups=st.lists(st.lists(costs, min_size=2, max_size=2), min_size=12, max_size=12))
def test_twelve_groups_match_brute_force(groups):
    limit = 0.4 * sum(max(cost.loss for cost in group) for group in groups)
    front = pareto_front(groups, most_loss=limit, most_bytes=math.inf)
    allowed = [(s, loss) for s, loss, _ in every_policy(groups) if loss <= limit]
    assert [point[:2] for point in front][:1] == ([min(allowed)] if allowed else [])


@given(groups=problems)
def test_points_have_the_costs_of_their_choices(groups):
    for point in pareto_front(groups, most_loss=math.inf, most_bytes=1e9):
        picked = [group[i] for group, i in zip(groups, point.choices, strict=True)]
        assert point.seconds == sum(cost.seconds for cost in picked)
        assert point.loss == sum(cost.loss for cost in picked)
        assert point.bytes == sum(cost.bytes for cost in picked)


def test_a_choice_that_overflows_is_never_taken():
    groups = [[Cost(seconds=0, loss=math.inf), Cost(seconds=9, loss=0)]]
    (point,) = pareto_front(groups, most_loss=math.inf, most_bytes=math.inf)
    assert point.choices == (1,)


@pytest.mark.parametrize("groups", [40])
def test_forty_groups_of_measured_sizes_take_no_long_time(groups):
    rows = [
        [
            Cost(seconds=1 + i % 7, loss=0.001),
            Cost(seconds=0.8 + i % 7, loss=0.01 * (1 + i % 5)),
            Cost(seconds=0.5 + i % 7, loss=0.03 * (1 + i % 3)),
        ]
        for i in range(groups)
    ]
    front = pareto_front(rows, most_loss=1.0, most_bytes=math.inf)
    assert front[0].loss <= 1.0
