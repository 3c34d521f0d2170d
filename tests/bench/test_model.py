import pytest
import torch

from narrowcast.bench.model import ModelWithLoss, set_up
from narrowcast.workloads import load_recipe


def test_everyone_gets_the_same_weights_and_batches(tiny):
    recipe = load_recipe(tiny).recipe
    first, second = set_up(recipe), set_up(recipe)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert a.equal(b)
    for a, b in zip(first.batches, second.batches, strict=True):
        assert a[0].equal(b[0])


def test_targets_are_the_tokens_that_follow(tiny):
    tokens, targets = set_up(load_recipe(tiny).recipe).batches[0]
    assert tokens[:, 1:].equal(targets[:, :-1])


def test_the_peers_loss_is_the_loss_the_trainer_takes(tiny):
    bench = set_up(load_recipe(tiny).recipe)
    peers = ModelWithLoss(bench.model)(*bench.batches[0])
    ours = bench.task.loss(bench.model, bench.batches[0])
    # Both are fp32 sums of 32 cross-entropies, perhaps in another order.
    torch.testing.assert_close(peers, ours, rtol=32 * 2**-24, atol=0)


def test_an_untrained_model_guesses_evenly(tiny):
    bench = set_up(load_recipe(tiny).recipe)
    loss = ModelWithLoss(bench.model)(*bench.batches[0]).item()
    assert loss == pytest.approx(torch.tensor(256.0).log().item(), rel=0.05)


def test_tokens_of_all_micro_batches_count(tiny):
    assert set_up(load_recipe(tiny, ["accumulate=3"]).recipe).tokens_a_step == 3 * 2 * 16
