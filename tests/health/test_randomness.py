import random

import numpy as np
import torch

from narrowcast.health.randomness import RandomState, drawing_from

CPU = torch.device("cpu")


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_a_block_draws_what_was_drawn_from_that_state():
    state = RandomState.now(CPU)
    first = draw()
    second_state = RandomState.now(CPU)
    with drawing_from(state):
        assert draw() == first
    second = draw()
    with drawing_from(second_state):
        assert draw() == second


def test_nobody_knows_afterwards_that_it_has_drawn():
    state = RandomState.now(CPU)
    expected = [draw(), draw()]
    state.restore()
    assert draw() == expected[0]
    with drawing_from(state):
        draw()
    assert draw() == expected[1]
