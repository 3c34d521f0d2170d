"""Gradients that the run did not make: dropped, added as torch adds them, or refused."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
HEAD = r"Call run\.zero_grad\(\) \(or optimizer\.zero_grad\(\)\) at the start of the step"
SCALES = {"without a scale": None, "with a scale": nc.LossScale(init_scale=256.0)}


def fresh(mlp, policy="fp32", **settings):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return nc.prepare(model, optimizer, policy=policy, **settings)


def loss_of(model, x=X):
    return model(x).float().square().mean()


def same_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


class Plain:
    """A plain torch loop with the calls of a run."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.zero_grad, self.autocast = optimizer.zero_grad, contextlib.nullcontext

    def backward(self, loss, **settings):
        loss.backward(**settings)

    def step(self, loss=None):
        if loss is not None:
            loss.backward()
        self.optimizer.step()


def gan(made_ready, *, steps=10, zero_grad="run"):
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    d = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    runs = [made_ready(m, torch.optim.Adam(m.parameters(), lr=2e-2)) for m in (g, d)]
    run_g, run_d = runs
    real, z = torch.randn(16, 8), torch.randn(steps, 2, 16, 4)

    def clear(run):
        if zero_grad:
            {"run": run, "optimizer": run.optimizer, "model": run.model}[zero_grad].zero_grad()

    for i in range(steps):
        clear(run_d)
        with run_d.autocast():
            fake = g(z[i, 0]).detach()
            real_loss, fake_loss = F.softplus(-d(real)).mean(), F.softplus(d(fake)).mean()
        run_d.backward(real_loss)
        run_d.backward(fake_loss)
        run_d.step()
        clear(run_g)
        with run_g.autocast():
            loss = F.softplus(-d(g(z[i, 1]))).mean()
        run_g.step(loss)
    return g, d


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("zero_grad", ["run", "optimizer", "model"])
def test_a_gan_that_clears_gradients_at_the_head_of_each_half_is_torchs_bit_for_bit(
    zero_grad, scale
):
    plain = gan(Plain)
    ours = gan(
        lambda model, optimizer: nc.prepare(model, optimizer, policy="fp32", loss_scale=scale),
        zero_grad=zero_grad,
    )
    assert all(map(same_weights, ours, plain))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_a_gan_that_leaves_gradients_in_the_discriminator_is_refused(policy):
    with pytest.raises(
        ConfigError, match=rf"0\.weight has a gradient that was not made by.*{HEAD}"
    ):
        gan(lambda m, o: nc.prepare(m, o, policy=policy), zero_grad=None)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_saliency_map_between_steps_is_refused_until_its_gradients_are_cleared(mlp, policy):
    run, plain = fresh(mlp, policy), fresh(mlp, policy)
    for each in (run, plain):
        each.step(loss_of(each.model))
    before = {name: w.clone() for name, w in run.model.state_dict().items()}
    x = X.clone().requires_grad_()
    loss_of(run.model, x).backward()
    with pytest.raises(ConfigError, match=HEAD):
        run.step(loss_of(run.model))
    assert all(torch.equal(w, before[name]) for name, w in run.model.state_dict().items())
    run.zero_grad()
    for each in (run, plain):
        each.step(loss_of(each.model))
    assert same_weights(run.model, plain.model)


def test_after_zero_grad_gradients_of_others_are_added_as_torch_adds_them(mlp):
    run = fresh(mlp)
    model = mlp()
    plain = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for each in (run, plain):
        for _ in range(3):
            each.zero_grad()
            loss_of(each.model, 2 * X).backward()
            each.backward(loss_of(each.model))
            loss_of(each.model, 3 * X).backward()
            each.step()
    assert same_weights(run.model, plain.model)


def test_with_a_loss_scale_gradients_of_others_are_refused_before_our_own(mlp):
    run = fresh(mlp, loss_scale=nc.LossScale())
    run.zero_grad()
    loss_of(run.model).backward()
    with pytest.raises(ConfigError, match=r"for example 0\.weight.*instead of loss\.backward"):
        run.backward(loss_of(run.model))


@pytest.mark.parametrize("where", ["before step", "before backward", "before unscale"])
def test_with_a_loss_scale_gradients_of_others_are_refused_after_our_own(mlp, where):
    run = fresh(mlp, loss_scale=nc.LossScale())
    run.backward(loss_of(run.model))
    loss_of(run.model).backward()
    calls = {
        "before step": run.step,
        "before backward": lambda: run.backward(loss_of(run.model)),
        "before unscale": run.unscale,
    }
    with pytest.raises(ConfigError, match=r"0\.weight was changed .*Call run\.unscale\(\) after"):
        calls[where]()


EDITS = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    "clip_grad_norm_, not foreach": lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=False),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_(p, 0.1),
    "another tensor": lambda p: setattr(p[0], "grad", p[0].grad * 2),
    "noise": lambda p: p[0].grad.add_(1e-3),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_gradients_edited_while_the_scale_is_in_them_are_refused(mlp, edit):
    run = fresh(mlp, loss_scale=nc.LossScale())
    run.backward(loss_of(run.model))
    edit(list(run.model.parameters()))
    with pytest.raises(ConfigError, match=r"Call run\.unscale\(\) after the last backward\(\)"):
        run.step()


def test_gradients_may_be_looked_at_and_let_go_while_the_scale_is_in_them(mlp):
    run = fresh(mlp, loss_scale=nc.LossScale())
    run.backward(loss_of(run.model))
    before = run.model[0].weight.detach().clone()
    assert all(p.grad.isfinite().all() for p in run.model.parameters())
    run.model[0].weight.grad = None
    assert run.step().applied
    assert torch.equal(run.model[0].weight, before)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("whose", ["run", "optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_in_whatever_way_are_no_others(mlp, scale, whose, set_to_none):
    run, plain = fresh(mlp, loss_scale=scale), fresh(mlp, loss_scale=scale)
    for _ in range(2):
        loss_of(run.model).backward()  # of somebody else
        {"run": run, "optimizer": run.optimizer, "model": run.model}[whose].zero_grad(
            set_to_none=set_to_none
        )
        run.backward(loss_of(run.model) / 2)
        run.backward(loss_of(run.model) / 2)
        run.step()
        plain.backward(loss_of(plain.model) / 2)
        plain.backward(loss_of(plain.model) / 2)
        plain.step()
    assert same_weights(run.model, plain.model)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_step_given_up_in_its_middle_leaves_nothing_to_the_next(mlp, scale, set_to_none):
    run, plain = fresh(mlp, loss_scale=scale), fresh(mlp, loss_scale=scale)
    run.backward(loss_of(run.model, 2 * X))
    run.model.zero_grad(set_to_none=set_to_none)
    for each in (run, plain):
        each.step(loss_of(each.model))
    assert same_weights(run.model, plain.model)


def test_losses_with_scales_of_their_own_and_one_graph_are_nobody_elses(mlp):
    scales = {"a": nc.LossScale(), "b": nc.LossScale()}
    run = fresh(mlp, loss_scale=scales)
    model = mlp()
    plain = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        for each in (run, plain):
            output = each.model(X)
            first, second = output.square().mean(), output.sum() * 2.0**-8
            named = ({"name": "a"}, {"name": "b"}) if each is run else ({}, {})
            each.zero_grad()
            each.backward(first, retain_graph=True, **named[0])
            each.backward(second, **named[1])
            each.step()
    assert same_weights(run.model, plain.model)


def test_gradients_of_a_step_taken_aside_are_not_the_runs(mlp):
    run, plain = fresh(mlp, loss_scale=nc.LossScale()), fresh(mlp, loss_scale=nc.LossScale())
    for each in (run, plain):
        each.backward(loss_of(each.model))
    with run.engine.isolated():
        run.backward(loss_of(run.model, 2 * X))
    assert run.step().applied
    plain.step()
    assert same_weights(run.model, plain.model)
    with run.engine.isolated():
        run.backward(loss_of(run.model, 2 * X))
    loss_of(run.model).backward()
    with pytest.raises(ConfigError, match="instead of loss"):
        run.step()


def test_a_step_taken_aside_leaves_no_gradient_in_a_weight_beside_the_model(mlp):
    model, temperature = mlp(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp32")
    with run.engine.isolated():
        run.backward(loss_of(model) * temperature)
    assert temperature.grad is None
