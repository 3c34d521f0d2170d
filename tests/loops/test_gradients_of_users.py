"""Gradients that a loop looks at or changes before the step: clipping, noise, accumulation."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import narrowcast as nc

STEPS = 8
GENERATOR = torch.Generator().manual_seed(17)
INPUTS = torch.randn(STEPS, 16, 12, generator=GENERATOR)
TARGETS = torch.randint(0, 5, (STEPS, 16), generator=GENERATOR)


def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def clip_by_norm(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, 0.3).item()


def clip_by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 0.02)
    return max(p.grad.abs().max().item() for p in parameters)


def add_noise(parameters):
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=1e-3)
    return sum(p.grad.norm().item() for p in parameters)


EDITS = [clip_by_norm, clip_by_value, add_noise]


def torchs_scaler(trained, edit, *, region):
    model, optimizer = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        optimizer.zero_grad()
        with region:
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.item(), edit(list(model.parameters()))]
        scaler.step(optimizer)
        scaler.update()
    return trained(seen, [model], [optimizer])


def ours(trained, edit, **settings):
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, **settings)
    seen = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        run.backward(loss)
        run.unscale()
        seen += [loss.item(), edit(list(model.parameters()))]
        run.step()
    run.release()
    return trained(seen, [model], [optimizer])


@pytest.mark.parametrize("loss_scale", [None, 1024.0], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_gradients_in_fp32_are_those_of_torchs_scaler(trained, same, edit, loss_scale):
    mine = ours(trained, edit, policy="fp32", loss_scale=loss_scale)
    same(mine, torchs_scaler(trained, edit, region=nullcontext()))


@pytest.mark.parametrize("edit", EDITS)
def test_edited_gradients_in_fp16_are_near_those_of_torchs_scaler(trained, near, edit, autocast):
    mine = ours(trained, edit, policy="fp16", loss_scale=1024.0)
    theirs = torchs_scaler(trained, edit, region=autocast("fp16"))
    near(mine, theirs, products=6, policy="fp16")


def test_edited_gradients_train_in_a_narrow_policy(trained, near, narrow_or_params):
    mine = ours(trained, clip_by_value, **narrow_or_params)
    theirs = torchs_scaler(trained, clip_by_value, region=nullcontext())
    near(mine, theirs, products=6, **narrow_or_params)


def test_our_clipping_after_the_users_look_is_torchs(trained, same):
    def plain(edit):
        model, optimizer = classifier()
        seen = []
        for x, y in zip(INPUTS, TARGETS, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            seen += [loss.item(), edit(list(model.parameters()))]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return trained(seen, [model], [optimizer])

    mine = ours(trained, clip_by_value, policy="fp32", loss_scale=1024.0, clip_norm=0.1)
    same(mine, plain(clip_by_value))


def plain_accumulation(trained):
    model, optimizer = classifier()
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(part), labels) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return trained(losses, [model], [optimizer])


def accumulation(trained, **settings):
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            with run.autocast():
                loss = F.cross_entropy(model(part), labels) / 4
            run.backward(loss)
            losses.append(loss.item())
        run.step()
    run.release()
    return trained(losses, [model], [optimizer])


@pytest.mark.parametrize("loss_scale", [None, 1024.0], ids=["unscaled", "scaled"])
def test_accumulation_in_fp32_is_the_plain_one(trained, same, loss_scale):
    mine = accumulation(trained, policy="fp32", loss_scale=loss_scale)
    same(mine, plain_accumulation(trained))


def test_accumulation_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    mine = accumulation(trained, **narrow_or_params)
    near(mine, plain_accumulation(trained), products=3, **narrow_or_params)


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def per_sample(model, x, y):
    """Return every sample's gradients: a leading dimension on each weight's."""

    def loss_of(weights, sample, label):
        return F.cross_entropy(functional_call(model, weights, (sample,)).float(), label)

    weights = {name: p.detach() for name, p in model.named_parameters()}
    return vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)


@torch.no_grad()
def clip_each(model, gradients):
    """Let no sample weigh more than any other, and hand the mean to the optimizer."""
    norms = torch.stack([g.float().flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    factors = (0.5 / norms).clamp(max=1)
    for name, p in model.named_parameters():
        shares = factors.view(-1, *[1] * p.dim())
        p.grad = (gradients[name] * shares).mean(0).to(p.dtype)
    return norms.mean().item()


def plain_per_sample(trained):
    model, optimizer = small()
    seen = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        seen.append(clip_each(model, per_sample(model, x, y)))
        optimizer.step()
        optimizer.zero_grad()
    return trained(seen, [model], [optimizer])


def private(trained, **settings):
    model, optimizer = small()
    run = nc.prepare(model, optimizer, **settings)
    seen = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            gradients = per_sample(model, x, y)
        seen.append(clip_each(model, gradients))
        run.step()
    run.release()
    return trained(seen, [model], [optimizer])


def test_per_sample_gradients_in_fp32_are_the_plain_ones(trained, same):
    same(private(trained, policy="fp32"), plain_per_sample(trained))


@pytest.mark.parametrize("policy", ["bf16", "fp8-tensor", "bf16, params=bf16, master=split"])
def test_per_sample_gradients_work_in_a_narrow_policy(trained, near, policy):
    mine = private(trained, policy=policy)
    near(mine, plain_per_sample(trained), products=6, policy=policy)
