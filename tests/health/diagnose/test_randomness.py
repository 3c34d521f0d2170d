import random

import numpy as np
import torch

from narrowcast.health.diagnose.randomness import RandomState, drawing_from

CPU = torch.device("cpu")


def test_a_block_draws_what_was_drawn_from_that_state():
    states, drawn = [], []
    for _ in range(2):
        states.append(RandomState.now(CPU))
        drawn.append(torch.rand(()).item())
    for state, number in zip(states, drawn, strict=True):
        with drawing_from(state):
            assert torch.rand(()).item() == number


def test_draws_from_a_saved_state_leave_the_generators_where_they_were():
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
