import pytest
import torch

from narrowcast.strategies.hybrid.control.optimizer_facts import optimizer_facts


def trained(make, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_adams_moments_are_those_of_all_its_weights_together():
    _, optimizer = trained(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95)))
    facts = optimizer_facts(optimizer)
    for name, mean, std in [
        ("exp_avg", facts.momentum_mean, facts.momentum_std),
        ("exp_avg_sq", facts.variance_mean, facts.variance_std),
    ]:
        whole = torch.cat([s[name].double().flatten() for s in optimizer.state.values()])
        assert mean == pytest.approx(float(whole.mean()), rel=1e-6)  # of fp32
        assert std == pytest.approx(float(whole.std(correction=0)), rel=1e-6)  # of fp32
    assert (facts.lr, facts.beta1, facts.beta2) == (0.01, 0.8, 0.95)
    assert facts.effective_lr == pytest.approx(0.01 / (facts.variance_mean**0.5 + 1e-8))


def test_sgd_has_its_momentum_and_no_variance():
    _, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    facts = optimizer_facts(optimizer)
    assert facts.momentum_std > 0
    assert (facts.variance_mean, facts.beta1, facts.effective_lr) == (0.0, 0.9, 0.1)


def test_an_optimizer_that_has_not_stepped_has_no_moments():
    _, optimizer = trained(torch.optim.Adam, steps=0)
    assert optimizer_facts(optimizer).momentum_std == 0.0
