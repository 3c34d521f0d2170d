"""`prepare(model, [muon, adamw])` against torch's own two in a plain loop, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

import narrowcast as nc
from narrowcast.errors import ConfigError

MASTERS = ("fp32", "split", "kahan", "stochastic", "none")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def two(net):
    matrices = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def batch(step):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def schedules(optimizers):
    return [ExponentialLR(optimizers[0], 0.9), LambdaLR(optimizers[1], lambda n: 1 / (n + 1))]


def plain(steps):
    net = model()
    optimizers = two(net)
    schedulers = schedules(optimizers)
    for step in range(steps):
        for each in optimizers:
            each.zero_grad()
        net(batch(step)).square().mean().backward()
        for each in (*optimizers, *schedulers):
            each.step()
    return net.state_dict()


def train(run, first, last):
    for step in range(first, last):
        with run.autocast():
            loss = run.model(batch(step)).square().mean()
        assert run.step(loss).applied


def prepared(policy="fp32", **settings):
    net = model()
    optimizers = two(net)
    scheduler = schedules(optimizers)
    return nc.prepare(net, optimizers, policy=policy, scheduler=scheduler, **settings)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_muon_beside_adamw_takes_the_steps_that_torch_s_two_would():
    run = prepared()
    train(run, 0, 6)
    assert equal(dict(run.model.state_dict()), dict(plain(6)))
    assert [type(each).__name__ for each in run.optimizers] == ["Muon", "AdamW"]
    assert "Muon beside" in run.update_path
    assert "several" in run.update_path


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_each_moves_master_weights_as_it_would_move_fp32_ones(master):
    """Gradients that no weight decides are those of a plain loop, so the weights must be too."""

    def loss_of(net):
        return sum((p * given_gradient(p)).sum() for p in net.parameters())

    run = prepared(f"fp32, params=bf16, master={master}")
    net = model()
    optimizers = two(net)
    schedulers = schedules(optimizers)
    for _ in range(5):
        for each in optimizers:
            each.zero_grad()
        loss_of(net).backward()
        for each in (*optimizers, *schedulers):
            each.step()
        run.step(loss_of(run.model))
    assert equal(run.fp32_state_dict(), dict(net.state_dict()))


def given_gradient(p):
    """One that bf16 holds exactly."""
    return torch.arange(p.numel()).view(p.shape).sin().bfloat16().to(p.dtype)


@pytest.mark.parametrize("policy", ["fp32", *(f"bf16, params=bf16, master={m}" for m in MASTERS)])
def test_a_run_of_two_optimizers_goes_on_bit_for_bit(policy, same_state):
    straight = prepared(policy, ema_decay=0.9)
    train(straight, 0, 3)
    saved = copy.deepcopy(straight.state_dict())
    train(straight, 3, 6)
    resumed = prepared(policy, ema_decay=0.9)
    train(resumed, 1, 2)
    resumed.load_state_dict(saved)
    train(resumed, 3, 6)
    assert same_state(resumed.state_dict(), straight.state_dict())


def test_release_gives_each_optimizer_its_weights_and_its_state_back():
    run = prepared("fp32, params=bf16, master=split")
    train(run, 0, 2)
    full = {name: value.clone() for name, value in run.fp32_state_dict().items()}
    net = run.release()
    assert equal(dict(net.state_dict()), full)
    for each in run.optimizers:
        held = [p for group in each.param_groups for p in group["params"]]
        assert {id(p) for p in held} <= {id(p) for p in net.parameters()}
        assert {id(p) for p in each.state} == {id(p) for p in held}
        assert len(each.state_dict()["state"]) == len(held)
        each.step()


def test_zero_grad_of_one_clears_what_that_one_holds():
    run = prepared("fp32, params=bf16")
    with run.autocast():
        loss = run.model(batch(0)).square().mean()
    run.backward(loss)
    run.optimizers[0].zero_grad()
    assert run.model[0].weight.grad is None
    assert run.model[0].bias.grad is not None
    run.optimizers[1].zero_grad()
    assert all(p.grad is None for p in run.model.parameters())


def test_none_of_them_is_stepped_by_hand():
    run = prepared()
    for each in run.optimizers:
        with pytest.raises(ConfigError, match=r"optimizer.step\(\) was called after prepare"):
            each.step()


def test_a_weight_in_two_optimizers_is_refused_by_name():
    net = model()
    both = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(net[3].parameters(), lr=0.1)]
    with pytest.raises(ConfigError, match=r"3\.weight is in two optimizers, 0 and 1"):
        nc.prepare(net, both)
    assert not hasattr(net[0], "nc_region")


def test_the_one_optimizer_of_several_is_not_guessed():
    run = prepared()
    with pytest.raises(ConfigError, match=r"got 2\. Use run.optimizers\[0\]"):
        run.optimizer  # noqa: B018
    with pytest.raises(ConfigError, match="at least one optimizer, got an empty list"):
        nc.prepare(model(), [])


def test_a_list_of_one_is_that_one():
    net = model()
    adamw = torch.optim.AdamW(net.parameters())
    run = nc.prepare(net, [adamw], policy="fp32")
    assert run.optimizer is adamw
    assert run.optimizers == (adamw,)


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_moments_from_before_prepare_go_on_a_few_weights_at_a_time(master, monkeypatch):
    monkeypatch.setattr("narrowcast.precision.weights.master.BUCKET", 32)
    net, theirs = model(), model()
    ours, plain_ones = two(net), two(theirs)

    def take(net, optimizers):
        for each in optimizers:
            each.zero_grad()
        sum((p * given_gradient(p)).sum() for p in net.parameters()).backward()
        for each in optimizers:
            each.step()

    take(net, ours)
    run = nc.prepare(net, ours, policy=f"fp32, params=bf16, master={master}")
    for _ in range(3):
        run.step(sum((p * given_gradient(p)).sum() for p in net.parameters()))
    for _ in range(4):
        take(theirs, plain_ones)
    assert equal(run.fp32_state_dict(), dict(theirs.state_dict()))
    run.release()
    take(net, ours)
    take(theirs, plain_ones)
    assert equal(dict(net.state_dict()), dict(theirs.state_dict()))
