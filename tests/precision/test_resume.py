"""A saved state, loaded into fresh objects, goes on bit for bit."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import narrowcast as nc
from narrowcast.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("guarded")
POLICIES = [
    "fp32", "bf16", "fp16", "fp8-tensor", "fp8-delayed", "bf16-pure", "aggressive",
    *(f"bf16, params=bf16, master={m}" for m in ("fp32", "kahan", "stochastic")),
    "fp16, params=fp16, master=kahan", "bf16, params=bf16, master=split; 3: params=fp32",
]  # fmt: skip
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


def fresh(policy, *, fused=False, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    settings = {"ema_decay": 0.9, "clip_norm": 0.5, **settings}
    return nc.prepare(model, optimizer, policy=policy, scheduler=scheduler, **settings)


def train(run, first, last):
    told = []
    for step in range(first, last):
        factor = math.inf if step % 4 == 1 else 1.0 + step
        with run.autocast():
            loss = F.mse_loss(run.model(X * factor), torch.zeros(8, 4))
        outcome = run.step(loss)
        told.append((outcome.applied, outcome.loss_scale, outcome.grad_norm, outcome.lr))
    return told


def scale_for(policy):
    if "fp16" not in policy:
        return {}
    return {"loss_scale": nc.LossScale(init_scale=1024.0, growth_interval=2)}


@pytest.mark.sampled(times=1)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_bit_for_bit_in_fresh_objects(policy, fused, same_state):
    settings = {"fused": fused, **scale_for(policy)}
    straight = fresh(policy, **settings)
    train(straight, 0, 6)
    saved = copy.deepcopy(straight.state_dict())
    rest = train(straight, 6, 12)
    resumed = fresh(policy, **settings)
    train(resumed, 3, 5)  # whatever it had been through is forgotten
    resumed.load_state_dict(saved)
    # NaN norms of skipped steps are not equal to themselves; their text is.
    assert str(train(resumed, 6, 12)) == str(rest)
    assert same_state(resumed.state_dict(), straight.state_dict())
    assert same_state(resumed.fp32_state_dict(), straight.fp32_state_dict())


def test_parts_go_on_where_they_stood(same_state):
    settings = {"scale_groups": ["0", "3"], **scale_for("fp16")}
    straight = fresh("fp16", **settings)
    train(straight, 0, 6)
    resumed = fresh("fp16", **settings)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    train(straight, 6, 12)
    train(resumed, 6, 12)
    assert same_state(resumed.state_dict(), straight.state_dict())


def test_patience_is_not_renewed_by_a_resume():
    straight = fresh("bf16", max_skipped_steps=4)
    for _ in range(3):
        straight.step(straight.model(X).sum() * math.nan)
    resumed = fresh("bf16", max_skipped_steps=4)
    resumed.load_state_dict(straight.state_dict())
    assert resumed.stats().overflows_at_floor == 3


def test_the_lost_update_meter_looks_at_the_same_steps():
    straight = fresh("bf16", lost_updates_every=3)
    train(straight, 0, 4)
    resumed = fresh("bf16", lost_updates_every=3)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for run in (straight, resumed):
        with run.autocast():
            loss = run.model(X).square().mean()
        assert run.step(loss).lost_updates is None
    assert resumed.steps_attempted == straight.steps_attempted == 5


def test_the_state_is_tensors_and_plain_data():
    def check(value):
        if isinstance(value, dict):
            assert all(isinstance(key, str | int) for key in value)
            return all(check(v) for v in value.values())
        if isinstance(value, list | tuple):
            return all(check(v) for v in value)
        return value is None or isinstance(value, torch.Tensor | str | int | float | bool)

    for policy in POLICIES:
        run = fresh(policy)
        train(run, 0, 1)
        state = run.state_dict()
        state["scheduler"][0]["state"].pop("lr_lambdas")  # torch's own list of None
        assert check(state), policy


def test_another_policy_is_refused_with_the_one_to_write():
    saved = fresh("bf16").state_dict()
    with pytest.raises(CheckpointError, match=r"written with the policy 'compute=bf16'"):
        fresh("fp16").load_state_dict(saved)


@pytest.mark.parametrize("foreign", [{}, {"model": {}}, nn.Linear(2, 2).state_dict()])
def test_a_foreign_state_is_refused(foreign):
    with pytest.raises(CheckpointError, match="not a prepared model's state"):
        fresh("bf16").load_state_dict(foreign)


OTHERS = {
    "another model": lambda: nc.prepare(
        *(lambda m: (m, torch.optim.AdamW(m.parameters())))(nn.Linear(3, 3)), policy="bf16"
    ),
    "no average": lambda: fresh("bf16", ema_decay=None),
    "a loss scale": lambda: fresh("bf16", loss_scale=nc.LossScale()),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_the_state_of_another_run_is_refused_and_nothing_is_loaded(other, same_state):
    run = fresh("bf16")
    train(run, 0, 2)
    before = copy.deepcopy(run.state_dict())
    with pytest.raises(CheckpointError, match="The checkpoint does not match this run"):
        run.load_state_dict(other().state_dict())
    assert same_state(run.state_dict(), before)
