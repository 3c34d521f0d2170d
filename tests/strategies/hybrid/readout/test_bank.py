import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.strategies.hybrid.readout.choice import SMALL, AverageBank, steps_between


def prepared(policy="fp32", *, width=3):
    torch.manual_seed(0)
    model = nn.Linear(6, width)
    return nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)


def train(run, bank, steps):
    """Return the full weights after every step, in the order of the model's parameters."""
    seen = []
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        with run.autocast():
            loss = run.model(x).square().mean()
        run.step(loss)
        bank.update()
        seen.append([run.engine.weights.full(p).clone() for p in run.engine.weights.all])
    return seen


@pytest.mark.parametrize("width", [3, SMALL // 6 + 1])
@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split"])
def test_an_average_is_the_weighted_mean_of_what_it_has_seen(policy, width):
    run = prepared(policy, width=width)
    bank = AverageBank(run, [2.0, 50.0], every=1)
    seen = train(run, bank, 12)
    for number, half_life in enumerate((2.0, 50.0)):
        for i, p in enumerate(run.engine.weights.all):
            expected = torch.zeros_like(seen[0][i], dtype=torch.float64)
            for n, weights in enumerate(seen, start=1):
                share = max(1 - 0.5 ** (1 / half_life), 1 / n)
                expected += share * (weights[i].double() - expected)
            found = bank.of(number, p)
            assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_long_half_life_is_the_plain_mean_at_first():
    run = prepared()
    bank = AverageBank(run, [1e9], every=1)
    seen = train(run, bank, 7)
    for i, p in enumerate(run.engine.weights.all):
        mean = torch.stack([weights[i] for weights in seen]).mean(0)
        assert torch.allclose(bank.of(0, p), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("width", [3, SMALL // 6 + 1])
def test_a_skipped_step_leaves_an_average_bit_for_bit(width):
    run = prepared(width=width)
    bank = AverageBank(run, [5.0], every=1)
    train(run, bank, 3)
    before = [bank.of(0, p).clone() for p in run.engine.weights.all]
    run.model.weight.data.add_(1.0)
    bank.update(applied=torch.tensor(False))
    assert all(map(torch.equal, before, [bank.of(0, p) for p in run.engine.weights.all]))


def test_updates_are_a_tenth_of_the_shortest_half_life_apart():
    assert steps_between([100.0, 30.0]) == 3
    assert steps_between([2.0]) == 1
    assert steps_between([]) == 1


def test_a_half_life_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="above 0"):
        AverageBank(prepared(), [0.0])
