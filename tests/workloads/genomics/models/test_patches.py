"""Patches against loops that cut one letter at a time."""

import torch
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists

from narrowcast.workloads.genomics.models.patches import (
    bounded,
    cut_at,
    every,
)


def cut_by_hand(wanted, *, least, most):
    starts, began = [True], 0
    for place in range(1, len(wanted)):
        length = place - began
        starts.append((length >= least and wanted[place]) or length >= most)
        if starts[-1]:
            began = place
    return starts


@given(wanted=lists(booleans(), min_size=1, max_size=90), least=integers(1, 9), more=integers(0, 9))
def test_bounded_starts_are_those_found_letter_by_letter(wanted, least, more):
    found = bounded(torch.tensor([wanted]), least=least, most=least + more)
    assert found[0].tolist() == cut_by_hand(wanted, least=least, most=least + more)


@given(
    length=integers(1, 90),
    rows=integers(1, 4),
    least=integers(1, 6),
    more=integers(0, 9),
    seed=integers(0, 1000),
)
def test_lengths_sum_to_the_letters_and_are_within_bounds(length, rows, least, more, seed):
    generator = torch.Generator().manual_seed(seed)
    real = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < real
    wanted = torch.rand(rows, length, generator=generator) < 0.3
    bound = -(-length // least)
    starts = bounded(wanted, least=least, most=least + more)
    patches = cut_at(starts, mask, bound=bound)
    assert torch.equal(patches.lengths.sum(1), real[:, 0])
    for row, lengths in enumerate(patches.lengths.tolist()):
        there = [each for each in lengths if each]
        assert lengths[: len(there)] == there  # empty ones come last
        assert all(least <= each <= least + more for each in there[:-1])
        ids = patches.ids[row, : real[row, 0]].tolist()
        assert ids == [number for number, each in enumerate(there) for _ in range(each)]


def test_pooling_is_the_mean_of_a_patch_and_spreading_gives_it_back():
    torch.manual_seed(0)
    letters = torch.randn(2, 7, 3)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    patches = cut_at(every(3, letters[..., 0]), mask, bound=3)
    pooled = patches.pooled(letters)
    torch.testing.assert_close(pooled[0, 1], letters[0, 3:6].mean(0))
    torch.testing.assert_close(pooled[1, 1], letters[1, 3])
    assert not pooled[1, 2].any()
    assert torch.equal(patches.mask, torch.tensor([[True, True, True], [True, True, False]]))
    torch.testing.assert_close(patches.spread(pooled, shifted=False)[0, 4], pooled[0, 1])
    shifted = patches.spread(pooled, shifted=True)
    torch.testing.assert_close(shifted[0, 4], pooled[0, 0])
    assert not shifted[:, :3].any()
