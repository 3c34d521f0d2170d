import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers

from narrowcast.hardware.randomness import (
    RandomState,
    capture_randomness,
    drawing_from,
    preserve_rng,
    restore_randomness,
    seed_everything,
)
from narrowcast.training.checkpoints.tree import flatten, unflatten

CPU = torch.device("cpu")


def draw():
    return (
        random.random(),
        random.gauss(),
        np.random.standard_normal(3).tolist(),  # an odd count leaves one in NumPy's pocket
        torch.rand(5).tolist(),
        torch.randn(3).tolist(),
    )


@given(seed=integers(0, 2**63 - 1))
def test_a_restored_state_gives_the_same_draws(seed):
    seed_everything(seed)
    draw()
    state = capture_randomness(CPU)
    expected = draw()
    draw()
    assert restore_randomness(state, CPU)
    assert draw() == expected


def test_the_same_seed_gives_the_same_draws_and_another_seed_others():
    def drawn(seed):
        seed_everything(seed)
        return draw()

    assert drawn(5) == drawn(5)
    assert all(a != b for a, b in zip(drawn(5), drawn(6), strict=True))


def test_the_state_survives_a_checkpoint():
    seed_everything(1)
    draw()
    state = unflatten(*flatten(capture_randomness(CPU)))
    expected = draw()
    restore_randomness(state, CPU)
    assert draw() == expected


def test_draws_inside_a_kept_context_leave_no_trace():
    seed_everything(2)
    expected = draw()
    seed_everything(2)
    with preserve_rng(CPU):
        draw()
    assert draw() == expected


def test_the_state_of_another_kind_of_device_is_said_to_be_missing():
    seed_everything(3)
    state = capture_randomness(CPU)
    expected = draw()
    assert not restore_randomness(state, torch.device("cuda"))
    assert draw() == expected


@pytest.mark.gpu
def test_a_restored_state_gives_the_same_draws_on_the_gpu():
    device = torch.device("cuda", 0)
    seed_everything(4)
    torch.rand(7, device=device)
    state = unflatten(*flatten(capture_randomness(device)))
    expected = torch.rand(5, device=device)
    torch.rand(3, device=device)
    assert restore_randomness(state, device)
    assert torch.equal(torch.rand(5, device=device), expected)


def test_a_block_draws_what_was_drawn_from_that_state():
    states, drawn = [], []
    for _ in range(2):
        states.append(RandomState.now(CPU))
        drawn.append(torch.rand(()).item())
    for state, number in zip(states, drawn, strict=True):
        with drawing_from(state):
            assert torch.rand(()).item() == number


def test_nobody_knows_afterwards_that_it_has_drawn():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def seed():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        return RandomState.now(CPU)

    seed()
    expected = [draw(), draw()]
    state = seed()
    found = [draw()]
    with drawing_from(state):
        draw()
    assert [*found, draw()] == expected
