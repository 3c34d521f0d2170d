"""The step in its parts: what `Prepared.step` is made of."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError


def prepared(policy="fp16", **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return nc.prepare(model, optimizer, policy=policy, clip_norm=1.0, **settings)


def run_backward(run, seed):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    with run.autocast():
        loss = run.model(x).float().square().mean()
    run.backward(loss)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "fp8-delayed, params=bf16, master=split"])
def test_a_step_is_its_three_parts_in_a_row(policy):
    whole, parts = prepared(policy), prepared(policy)
    for seed in range(4):
        for run in (whole, parts):
            run_backward(run, seed)
        one, engine = whole.step(), parts.engine
        engine.begin_step()
        present, metered = engine.weights.with_gradients(), engine.is_metered
        other = engine.end_step(
            engine.queue_update(present, metered=metered), present, metered=metered
        )
        told = [
            (o.step, o.applied, o.grad_norm, o.loss_scale, o.lost_updates) for o in (one, other)
        ]
        assert told[0] == told[1]
    for mine, theirs in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_lost_updates_are_metered_every_so_many_steps():
    run = prepared(lost_updates_every=3)
    metered = []
    for seed in range(7):
        metered.append(run.engine.is_metered)
        run_backward(run, seed)
        assert (run.step().lost_updates is not None) is metered[-1]
    assert metered == [True, False, False, True, False, False, True]


def test_an_impossible_plan_is_refused_and_nothing_has_changed():
    run = prepared()
    other = nc.plan(nn.Sequential(nn.Linear(16, 16)), "fp32", hardware=run.plan.hardware)
    run.engine.check_plan_change(other)  # it names no module that this one lacks
    stranger = nc.plan(nn.ModuleDict({"a": nn.Linear(4, 4)}), "fp32", hardware=run.plan.hardware)
    plan = run.plan
    with pytest.raises(ConfigError, match="plan was made for another model"):
        run.engine.check_plan_change(stranger)
    assert run.plan is plan
