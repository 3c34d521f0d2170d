"""Loops with a step inside the step: SAM's walk uphill and back, MAML's own update of a copy."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import narrowcast as nc

STEPS = 8
GENERATOR = torch.Generator().manual_seed(31)
INPUTS = torch.randn(STEPS, 16, 12, generator=GENERATOR)
TARGETS = torch.randint(0, 5, (STEPS, 16), generator=GENERATOR)


def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def walk_uphill(model):
    """Move every weight along its gradient; return what they were."""
    before = [p.clone() for p in model.parameters()]
    norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.add_((0.05 / norm) * p.grad)
    return before


@torch.no_grad()
def walk_back(model, before):
    for p, value in zip(model.parameters(), before, strict=True):
        p.copy_(value)


def plain_sam(trained):
    model, optimizer = classifier()
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = walk_uphill(model)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        walk_back(model, before)
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


def sam(trained, **settings):
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        run.backward(loss)
        run.unscale()
        before = walk_uphill(model)
        run.zero_grad()
        with run.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        run.backward(loss)
        walk_back(model, before)
        run.step()
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], [optimizer])


def test_sam_in_fp32_is_the_plain_one(trained, same):
    same(sam(trained, policy="fp32"), plain_sam(trained))


def test_sam_in_fp32_with_a_loss_scale_is_the_plain_one(trained, same):
    mine = sam(trained, policy="fp32", loss_scale=nc.LossScale(init_scale=1024.0))
    same(mine, plain_sam(trained))


def test_sam_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    # Two passes of three products each, for every step.
    near(sam(trained, **narrow_or_params), plain_sam(trained), products=6, **narrow_or_params)


def test_weights_that_walk_away_and_back_keep_the_digits_beside_them():
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
    with run.autocast():
        loss = F.cross_entropy(model(INPUTS[0]).float(), TARGETS[0])
    run.backward(loss)
    full = {name: value.clone() for name, value in run.fp32_state_dict().items()}
    before = walk_uphill(model)
    walk_back(model, before)
    found = run.fp32_state_dict()
    assert [name for name, value in full.items() if not torch.equal(found[name], value)] == []


def maml_loss(model, x, y):
    """Adapt to one half of a batch, and be judged by the other, through the adaptation."""
    weights = dict(model.named_parameters())
    first = F.cross_entropy(functional_call(model, weights, (x[:8],)).float(), y[:8])
    slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
    pairs = zip(weights.items(), slopes, strict=True)
    adapted = {name: p - 0.1 * slope for (name, p), slope in pairs}
    return F.cross_entropy(functional_call(model, adapted, (x[8:],)).float(), y[8:])


def plain_maml(trained):
    model, optimizer = classifier()
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        loss = maml_loss(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


def maml(trained, **settings):
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = maml_loss(model, x, y)
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], [optimizer])


def test_maml_in_fp32_is_the_plain_one(trained, same):
    same(maml(trained, policy="fp32"), plain_maml(trained))


def test_maml_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    near(maml(trained, **narrow_or_params), plain_maml(trained), products=8, **narrow_or_params)
