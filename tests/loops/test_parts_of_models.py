"""Models entered by other doors than `model(x)`: a method, a part, a checkpointed block."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

STEPS = 8
GENERATOR = torch.Generator().manual_seed(19)
INPUTS = torch.randn(STEPS, 16, 12, generator=GENERATOR)


class AutoEncoder(nn.Module):
    """Has `encode` and `decode`, and no `forward`."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 12))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, code):
        return self.decoder(code)


def parts():
    torch.manual_seed(0)
    model = AutoEncoder()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain_autoencoder(trained):
    model, optimizer = parts()
    losses = []
    for x in INPUTS:
        loss = F.mse_loss(model.decode(model.encode(x)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


def autoencoder(trained, **settings):
    model, optimizer = parts()
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for x in INPUTS:
        with run.autocast():
            loss = F.mse_loss(model.decode(model.encode(x)).float(), x)
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], [optimizer])


def test_methods_of_a_model_in_fp32_are_the_plain_ones(trained, same):
    same(autoencoder(trained, policy="fp32"), plain_autoencoder(trained))


def test_methods_of_a_model_train_in_a_narrow_policy(trained, near, narrow_or_params):
    mine = autoencoder(trained, **narrow_or_params)
    near(mine, plain_autoencoder(trained), products=6, **narrow_or_params)


@pytest.mark.parametrize("door", ["encode", "encoder", "encoder.0"])
def test_a_part_called_alone_computes_as_it_does_inside_compute(door, narrow_or_params):
    model, optimizer = parts()
    run = nc.prepare(model, optimizer, **narrow_or_params)
    call = model.encode if door == "encode" else model.get_submodule(door)
    with run.autocast():
        inside = call(INPUTS[0])
    assert torch.equal(call(INPUTS[0]), inside)


class Deep(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
        )
        self.last = nn.Linear(16, 12)
        self.how = how

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            again = {"reentrant": True, "not reentrant": False}.get(self.how)
            h = h + (block(h) if again is None else checkpoint(block, h, use_reentrant=again))
        return self.last(h)


HOW = ["reentrant", "not reentrant"]


def checkpointed(trained, how, **settings):
    torch.manual_seed(0)
    model = Deep(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for x in INPUTS:
        with run.autocast():
            loss = F.mse_loss(model(x).float(), x)
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], [optimizer])


def plain_checkpointed(trained, how):
    torch.manual_seed(0)
    model = Deep(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x in INPUTS:
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


@pytest.mark.parametrize("how", HOW)
def test_activation_checkpointing_in_fp32_is_the_plain_one(trained, same, how):
    same(checkpointed(trained, how, policy="fp32"), plain_checkpointed(trained, how))


@pytest.mark.parametrize("how", HOW)
def test_activations_computed_again_are_those_that_were_kept(trained, same, narrow_or_params, how):
    """Stronger than to be near: a policy computes twice what it would have kept, bit for bit."""
    kept = checkpointed(trained, "kept", **narrow_or_params)
    same(checkpointed(trained, how, **narrow_or_params), kept)
