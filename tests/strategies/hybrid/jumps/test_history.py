"""A history holds what its budget allows, evenly spaced, the newest exactly."""

import copy

import pytest
import torch

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.jumps.history import HistorySettings, WeightHistory


def walk(randn, snapshots):
    points = [[randn(12, 10), randn(6)] for _ in range(snapshots)]
    return lambda time: points[time]


@pytest.mark.parametrize("keep", ["fp32", "bf16", "svd", "random"])
@pytest.mark.parametrize("place", ["device", "cpu"])
def test_the_newest_snapshot_is_exact_however_movements_are_kept(history_of, randn, keep, place):
    way = walk(randn, 6)
    history = history_of(way, 6, keep=keep, place=place, most=4)
    assert all(map(torch.equal, history.newest(), way(5)))


def test_movements_are_the_differences_of_snapshots(history_of, randn):
    way = walk(randn, 5)
    history = history_of(way, 5)
    for j in range(4):
        expected = [b - a for a, b in zip(way(j), way(j + 1), strict=True)]
        assert all(map(torch.equal, history.move(j), expected))
    assert torch.equal(history.moves_of(1)[2], (way(3)[1] - way(2)[1]).flatten())


def test_small_movements_of_large_weights_keep_the_digits_of_bf16(history_of):
    history = history_of(lambda time: [torch.full((4,), 100 + time * 2**-10)], 3, keep="bf16")
    assert torch.equal(history.move(1)[0], torch.full((4,), 2**-10))


def test_the_oldest_gives_way(history_of, randn):
    history = history_of(walk(randn, 6), 6, most=4)
    assert history.steps == (20, 30, 40, 50)


@pytest.mark.parametrize("keep", ["fp32", "bf16", "svd", "random"])
def test_bytes_stay_within_the_budget_and_are_told(history_of, randn, keep):
    way = walk(randn, 8)
    large = WeightHistory(way(0), HistorySettings(keep=keep, rank=2))
    budget = large.bytes_for(5) + 1
    history = history_of(way, 8, keep=keep, rank=2, most=8, budget_bytes=budget)
    assert len(history) == history.capacity == 5
    assert history.bytes() == history.bytes_for(5) <= budget


def test_a_budget_for_fewer_than_needed_is_refused_with_what_it_takes(randn):
    weights = [randn(12, 10)]
    settings = HistorySettings(keep="bf16", budget_bytes=1000)
    with pytest.raises(RecipeError, match=r"needs 4, which take 1,200 bytes; write .*=1200"):
        WeightHistory(weights, settings, needs=4)


def test_a_snapshot_is_due_every_so_many_steps(randn):
    history = WeightHistory([randn(2)], HistorySettings(every=10))
    assert history.due(3)
    history.take(3, [randn(2)])
    assert next(step for step in range(4, 20) if history.due(step)) == 13


@pytest.mark.parametrize("step", [5, 21])
def test_after_a_gap_or_a_step_back_it_begins_anew(randn, step):
    history = WeightHistory([randn(2)], HistorySettings(every=10))
    history.take(0, [randn(2)])
    history.take(10, [randn(2)])
    history.take(step, [randn(2)])
    assert history.steps == (step,)


def test_a_snapshot_does_not_follow_the_weights(randn):
    weights = [randn(3)]
    before = weights[0].clone()
    history = WeightHistory(weights, HistorySettings(every=1))
    history.take(0, weights)
    weights[0].add_(1)
    assert torch.equal(history.newest()[0], before)


def test_without_last_is_the_history_of_then(history_of, randn):
    way = walk(randn, 5)
    then, now = history_of(way, 3, most=5), history_of(way, 5).without_last(2)
    assert now.steps == then.steps
    assert all(map(torch.equal, now.combine([1, 2]), then.combine([1, 2])))


@pytest.mark.parametrize("keep", ["fp32", "bf16", "svd", "random"])
def test_a_resumed_history_goes_on_bit_for_bit(history_of, randn, keep):
    way = walk(randn, 6)
    first = history_of(way, 4, keep=keep, rank=2, most=4)
    second = WeightHistory(way(0), first.settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for time in (4, 5):
        first.take(time * 10, way(time))
        second.take(time * 10, way(time))
    assert second.steps == first.steps
    for j in range(3):
        assert all(map(torch.equal, first.move(j), second.move(j)))


def test_a_history_with_other_settings_is_refused(history_of, randn):
    state = history_of(walk(randn, 2), 2, keep="bf16").state_dict()
    other = WeightHistory([randn(12, 10), randn(6)], HistorySettings(keep="fp32"))
    with pytest.raises(CheckpointError, match="write the settings of the checkpoint"):
        other.load_state_dict(state)


def test_nothing_to_keep_is_refused():
    with pytest.raises(RecipeError, match="every=0"):
        HistorySettings(every=0)
