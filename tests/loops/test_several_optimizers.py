"""Several optimizers on one model, and schedules that need more than a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau

import narrowcast as nc

STEPS = 10
GENERATOR = torch.Generator().manual_seed(13)
INPUTS = torch.randn(STEPS, 16, 12, generator=GENERATOR)
TARGETS = torch.randint(0, 5, (STEPS, 16), generator=GENERATOR)


def muon_and_adamw():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.9)
    adamw = torch.optim.AdamW(vectors, lr=1e-2)
    schedules = LinearLR(muon, total_iters=6), CosineAnnealingLR(adamw, T_max=STEPS)
    return model, [muon, adamw], list(schedules)


def plain_muon(trained):
    model, optimizers, schedulers = muon_and_adamw()
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        loss = F.cross_entropy(model(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for each in (*optimizers, *schedulers):
            each.step()
        losses.append(loss.item())
    return trained(losses, [model], optimizers)


def muon(trained, **settings):
    model, optimizers, schedulers = muon_and_adamw()
    run = nc.prepare(model, optimizers, scheduler=schedulers, **settings)
    assert run.optimizers == tuple(optimizers)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], optimizers)


def test_muon_with_adamw_in_fp32_is_the_plain_one(trained, same):
    same(muon(trained, policy="fp32"), plain_muon(trained))


def test_muon_with_adamw_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    # Muon makes every direction of an update as long as every other, errors too.
    near(muon(trained, **narrow_or_params), plain_muon(trained), products=12, **narrow_or_params)


def test_a_skipped_step_moves_none_of_several_optimizers(trained):
    model, optimizers, schedulers = muon_and_adamw()
    run = nc.prepare(model, optimizers, scheduler=schedulers, policy="bf16")
    before = trained([], [model], optimizers).tensors()
    before = {name: value.clone() for name, value in before.items()}
    with run.autocast():
        loss = F.cross_entropy(model(INPUTS[0] * float("inf")), TARGETS[0])
    assert not run.step(loss).applied
    after = trained([], [model], optimizers).tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [each.last_epoch for each in schedulers] == [0, 0]


def small():
    torch.manual_seed(0)
    model = nn.Linear(12, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def plain_plateau(trained):
    model, optimizer, scheduler = small()
    losses, rates = [], []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return trained(losses + rates, [model], [optimizer])


def plateau(trained, **settings):
    model, optimizer, scheduler = small()
    run = nc.prepare(model, optimizer, scheduler=scheduler, **settings)
    losses, rates = [], []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)
        run.scheduler_step(loss.item())
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    run.release()
    return trained(losses + rates, [model], [optimizer])


def test_a_plateau_in_fp32_is_the_plain_one(trained, same):
    theirs = plain_plateau(trained)
    assert theirs.losses[-1] < 0.5  # the rate did fall
    same(plateau(trained, policy="fp32"), theirs)


def test_a_plateau_works_in_a_narrow_policy(trained, near, narrow):
    near(plateau(trained, **narrow), plain_plateau(trained), products=2, **narrow)


@pytest.mark.parametrize("kept", ["run", "user"])
def test_a_plateau_that_the_user_steps_is_the_users(kept):
    model, optimizer, scheduler = small()
    given = {"scheduler": scheduler} if kept == "run" else {}
    run = nc.prepare(model, optimizer, policy="bf16", **given)
    for value in (1.0, 2.0, 3.0):
        with run.autocast():
            loss = F.cross_entropy(model(INPUTS[0]), TARGETS[0])
        run.step(loss)
        run.scheduler_step(value) if kept == "run" else scheduler.step(value)
    assert optimizer.param_groups[0]["lr"] == 0.125
