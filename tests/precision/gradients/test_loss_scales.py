"""One scale per loss."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError, DivergedError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def prepared(scales, *, policy="fp32", **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return nc.prepare(model, optimizer, policy=policy, loss_scale=scales, **settings), plain


def losses(model):
    out = model(X)
    return out[:, 0].square().mean(), out[:, 1].abs().mean() * 100


def values(run):
    saved = run.state_dict()["scales"]["losses"]
    return {name: float(scale["value"]) for name, scale in saved.items()}


TWO = {"small": nc.LossScale(init_scale=2.0**18), "large": nc.LossScale(init_scale=2.0)}


def test_two_losses_with_scales_of_their_own_give_the_gradients_of_their_sum():
    run, plain = prepared(TWO)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(5):
        for name, loss in zip(TWO, losses(run.model), strict=True):
            run.backward(loss, name=name, retain_graph=True)
        for loss in losses(plain):
            loss.backward(retain_graph=True)
        for mine, other in zip(run.model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
        assert run.step().applied
        theirs.step()
        theirs.zero_grad()
    for mine, other in zip(run.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_only_the_loss_that_overflowed_backs_off():
    run, _ = prepared(TWO)
    first, second = losses(run.model)
    run.backward(first, name="small", retain_graph=True)
    run.backward(second * float("inf"), name="large")
    outcome = run.step()
    assert not outcome.applied
    assert values(run) == {"small": 2.0**18, "large": 1.0}


def test_a_loss_that_took_no_part_in_a_step_keeps_its_scale():
    run, _ = prepared(TWO)
    first, _ = losses(run.model)
    run.backward(first * float("nan"), name="small")
    run.step()
    assert values(run) == {"small": 2.0**17, "large": 2.0}


def test_training_is_given_up_only_when_the_loss_to_blame_is_at_its_floor():
    scales = {"calm": nc.LossScale(init_scale=1.0), "wild": nc.LossScale(init_scale=2.0**10)}
    run, _ = prepared(scales, max_skipped_steps=3)

    def step():
        calm, wild = losses(run.model)
        run.backward(calm, name="calm", retain_graph=True)
        run.backward(wild * float("inf"), name="wild")
        return run.step()

    for _ in range(10 + 3):  # ten to the floor, three that are patience
        assert not step().applied
    with pytest.raises(DivergedError, match="3 steps in a row"):
        step()


def test_a_loss_without_a_scale_is_refused_by_name():
    run, _ = prepared(TWO)
    with pytest.raises(ConfigError, match=r"no loss scale for 'other'.*small, large"):
        run.backward(losses(run.model)[0], name="other")


def test_fp16_gradients_cannot_be_unscaled_in_place_and_are_refused():
    with pytest.raises(ConfigError, match="Write grads=fp32"):
        prepared(TWO, policy="fp16, params=fp16")


def test_what_is_refused_leaves_the_model_as_it_was():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="needs a single loss scale"):
        nc.prepare(model, optimizer, policy="bf16-pure", scale_groups=["*"])
    assert type(model) is nn.Linear
    assert model.weight.dtype == torch.float32
    assert optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.usefixtures("guarded")
def test_scales_per_loss_work_with_masters_clipping_and_fp16_products():
    run, _ = prepared(TWO, policy="fp16, params=bf16, master=split", clip_norm=0.5)
    for _ in range(25):
        with run.autocast():
            pair = losses(run.model)
        for name, loss in zip(TWO, pair, strict=True):
            run.backward(loss, name=name, retain_graph=True)
        run.step()
    assert run.stats().applied > 10
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_a_scale_that_was_asked_for_without_need_outlives_a_policy_that_needs_one():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp32", loss_scale=1024.0)
    run.set_policy("fp16")
    run.set_policy("fp32")
    with run.autocast():
        loss = model(torch.ones(2, 4)).sum()
    assert run.step(loss).loss_scale == 1024
