"""Faithfulness by hand."""

import torch

from narrowcast.workloads.decompose.losses.penalties import Faithfulness


def test_faithfulness_is_the_mean_square_of_what_is_left_of_all_weights(numbers):
    assert Faithfulness(coefficient=1.0)(numbers()).tolist() == [1.0]  # each of two leaves 1


def test_sites_count_by_their_weights_and_seeds_apart(network):
    step = network()
    squares, weights = torch.zeros(2, dtype=torch.float64), 3 * 4 + 4 * 5
    modules = (step.decomposition.target[0], step.decomposition.target[2])
    components = list(step.decomposition.components.parameters())
    for module, v, u in zip(modules, components[::2], components[1::2], strict=True):
        for seed in range(2):
            squares[seed] += (module.weight[seed] - (v[seed] @ u[seed]).T).square().sum().detach()
    found = Faithfulness(coefficient=1.0)(step)
    torch.testing.assert_close(found, squares / weights, rtol=1e-12, atol=0)
