"""Weights that are averages of weights: Lookahead, SWA, schedule-free, and an average of ours."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import narrowcast as nc

STEPS = 10
GENERATOR = torch.Generator().manual_seed(11)
INPUTS = torch.randn(STEPS, 16, 12, generator=GENERATOR)
TARGETS = torch.randint(0, 5, (STEPS, 16), generator=GENERATOR)


def classifier(optimizer=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    return model, optimizer(model.parameters(), **{"lr": 0.05, **settings})


@torch.no_grad()
def look_ahead(slow, weights, *, i):
    """Every third step, let the slow weights follow and the fast ones begin anew from there."""
    if i % 3 == 2:
        for name, value in weights.items():
            slow[name].lerp_(value, 0.5)


def plain_lookahead(trained):
    model, optimizer = classifier(torch.optim.AdamW, lr=1e-2)
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for i, (x, y) in enumerate(zip(INPUTS, TARGETS, strict=True)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look_ahead(slow, {name: p.detach() for name, p in model.named_parameters()}, i=i)
        if i % 3 == 2:
            model.load_state_dict(slow, strict=False)
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


def lookahead(trained, **settings):
    model, optimizer = classifier(torch.optim.AdamW, lr=1e-2)
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for i, (x, y) in enumerate(zip(INPUTS, TARGETS, strict=True)):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)
        full = run.fp32_state_dict()
        look_ahead(slow, {name: full[name] for name in slow}, i=i)
        if i % 3 == 2:
            model.load_state_dict(slow, strict=False)
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], [optimizer])


def test_lookahead_in_fp32_is_the_plain_one(trained, same):
    same(lookahead(trained, policy="fp32"), plain_lookahead(trained))


def test_lookahead_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    mine = lookahead(trained, **narrow_or_params)
    near(mine, plain_lookahead(trained), products=3, **narrow_or_params)


def test_weights_loaded_into_a_model_of_16_bits_are_those_it_goes_on_from():
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
    torch.manual_seed(1)
    wanted = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    model.load_state_dict(wanted, strict=False)
    found = run.fp32_state_dict()
    for name, value in wanted.items():
        # Half a spacing of bf16 for what was loaded, another half for digits from before.
        torch.testing.assert_close(found[name], value, rtol=2.0**-7, atol=0)


def plain_swa(trained, *, ema):
    model, optimizer = classifier()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None)
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=5)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        losses.append(loss.item())
    update_bn(INPUTS, averaged)
    return trained(losses, [model, averaged], [optimizer])


def swa(trained, *, ema, copied="before", **settings):
    model, optimizer = classifier()
    average = get_ema_multi_avg_fn(0.9) if ema else None
    scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=5)
    averaged = AveragedModel(model, multi_avg_fn=average)
    run = nc.prepare(model, optimizer, scheduler=scheduler, **settings)
    if copied == "after":
        averaged = AveragedModel(model, multi_avg_fn=average)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)
        averaged.update_parameters(copy.deepcopy(model))  # a copy is plain, with all digits
        losses.append(loss.item())
    run.release()
    update_bn(INPUTS, averaged)
    return trained(losses, [model, averaged], [optimizer])


@pytest.mark.parametrize("ema", [True, False], ids=["ema", "swa"])
@pytest.mark.parametrize("copied", ["before", "after"])
def test_swa_in_fp32_is_the_plain_one(trained, same, ema, copied):
    same(swa(trained, ema=ema, copied=copied, policy="fp32"), plain_swa(trained, ema=ema))


@pytest.mark.parametrize("copied", ["before", "after"])
def test_swa_trains_in_a_narrow_policy(trained, near, narrow_or_params, copied):
    mine = swa(trained, ema=False, copied=copied, **narrow_or_params)
    assert mine.modules[1].module[0].weight.dtype == torch.float32
    near(mine, plain_swa(trained, ema=False), products=3, **narrow_or_params)


def plain_schedule_free(trained, optimizer_class):
    model, optimizer = classifier(optimizer_class, lr=1e-2, warmup_steps=2)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        model.train()
        optimizer.train()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            losses += [loss.item(), F.cross_entropy(model(x), y).item()]
    return trained(losses, [model], [optimizer])


def schedule_free(trained, optimizer_class, **settings):
    model, optimizer = classifier(optimizer_class, lr=1e-2, warmup_steps=2)
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        model.train()
        optimizer.train()
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)
        model.eval()
        optimizer.eval()
        with torch.no_grad(), run.autocast():
            losses += [loss.item(), F.cross_entropy(model(x), y).item()]
    run.release()
    return trained(losses, [model], [optimizer])


@pytest.fixture(params=["AdamWScheduleFree", "SGDScheduleFree"])
def schedule_free_class(request):
    return getattr(pytest.importorskip("schedulefree"), request.param)


def test_schedule_free_in_fp32_is_the_plain_one(trained, same, schedule_free_class):
    mine = schedule_free(trained, schedule_free_class, policy="fp32")
    same(mine, plain_schedule_free(trained, schedule_free_class))


def test_schedule_free_trains_in_a_narrow_policy(
    trained, near, narrow_or_params, schedule_free_class
):
    mine = schedule_free(trained, schedule_free_class, **narrow_or_params)
    theirs = plain_schedule_free(trained, schedule_free_class)
    near(mine, theirs, products=3, **narrow_or_params)


def test_an_average_of_ours_is_torchs():
    model, optimizer = classifier()
    theirs, their_optimizer = classifier()
    averaged = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(theirs)  # which copies; ours begins with a copy too
    run = nc.prepare(model, optimizer, policy="fp32", ema_decay=0.9)
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.step(loss)
        their_optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        their_optimizer.step()
        averaged.update_parameters(theirs)
    expected = copy.deepcopy(dict(averaged.module.named_parameters()))
    found = run.ema_state_dict()
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=2.0**-22, atol=2.0**-24)
