import pytest
import torch

from narrowcast.bench.model import set_up
from narrowcast.workloads import load_recipe

SYNTHETIC = ["data.text=synthetic"]


@pytest.mark.parametrize("words", [[], SYNTHETIC])
def test_everyone_gets_the_same_weights_and_batches(words, tiny):
    recipe = load_recipe(tiny, words).recipe
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
    peers = bench.model_with_loss()(bench.batches[0])
    ours = bench.task.loss(bench.model, bench.batches[0])
    # Both are fp32 sums of 32 cross-entropies, perhaps in another order.
    torch.testing.assert_close(peers, ours, rtol=32 * 2**-24, atol=0)


def test_an_untrained_model_guesses_evenly(tiny):
    bench = set_up(load_recipe(tiny, SYNTHETIC).recipe)
    loss = bench.model_with_loss()(bench.batches[0]).item()
    assert loss == pytest.approx(torch.tensor(256.0).log().item(), rel=0.05)


def test_tokens_of_all_micro_batches_count(tiny):
    recipe = load_recipe(tiny, ["gradient_accumulation_steps=3"]).recipe
    assert set_up(recipe).work == {"tokens": 3 * 2 * 16}


def test_any_task_is_measured_on_its_own_data_in_its_own_unit(waves):
    bench = set_up(waves(gradient_accumulation_steps=2))
    assert bench.work == {"series": 8}
    x, y = bench.batches[0]
    assert x.shape == (4, 16)
    assert bench.model_with_loss()((x, y)).equal(bench.task.loss(bench.model, (x, y)))


def test_text_is_read_and_random_tokens_are_not_put_in_its_place(tiny):
    tokens, _ = set_up(load_recipe(tiny).recipe).batches[0]
    assert bytes(tokens.flatten().tolist()).isascii()  # Python's own help; random bytes are not
