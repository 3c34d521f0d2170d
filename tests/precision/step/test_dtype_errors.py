"""A layer that is reached without autocast, and what is said of it."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import narrowcast as nc

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))


class Island(nn.Module):
    """Switches autocast off for its inner layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            h = self.inner(x.float())
        return self.outer(h)


class Again(torch.autograd.Function):
    """Calls a layer again in its backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, layer, *weights):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):  # by the user
            x = x.detach().requires_grad_()
            y = ctx.layer(x)
        found = torch.autograd.grad(y, [x, *ctx.layer.parameters()], grad.to(y.dtype))
        return found[0], None, *found[1:]


class Reversible(Island):
    def forward(self, x):
        return self.outer(Again.apply(x, self.inner, *self.inner.parameters()))


def step(model, policy):
    run = nc.prepare(model, SGD(model.parameters(), 0.1), policy=policy)
    with run.autocast():
        loss = model(X).float().square().mean()
    run.step(loss)
    return run


@pytest.mark.parametrize("kind", [Island, Reversible])
def test_torchs_error_is_followed_by_what_to_write(kind):
    with pytest.raises(RuntimeError, match="dtype") as caught:
        step(kind(), "bf16, params=bf16")
    (note,) = caught.value.__notes__
    assert "`inner: params=fp32`" in note


@pytest.mark.parametrize("kind", [Island, Reversible])
def test_what_is_written_then_helps(kind):
    run = step(kind(), "bf16, params=bf16; inner: params=fp32")
    assert run.steps_applied == 1


def test_an_error_of_other_things_is_left_as_it_is():
    model = Island()
    run = nc.prepare(model, SGD(model.parameters(), 0.1), policy="bf16, params=bf16")
    with pytest.raises(RuntimeError, match="shapes") as caught, run.autocast():
        model.outer(torch.ones(4, 7))
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones(2, 12, dtype=torch.int64)])
def test_what_no_policy_would_help_is_left_as_it_is(wrong):
    model = nn.ModuleList([nn.Embedding(4, 4), nn.Linear(12, 12)])
    run = nc.prepare(model, SGD(model.parameters(), 0.1), policy="bf16, params=bf16")
    layer = model[0] if wrong.dim() == 1 else model[1]
    with pytest.raises(RuntimeError) as caught, run.autocast():
        layer(wrong)
    assert not hasattr(caught.value, "__notes__")


def test_it_is_said_once():
    model = Island()
    run = nc.prepare(model, SGD(model.parameters(), 0.1), policy="bf16, params=bf16")
    with pytest.raises(RuntimeError, match="dtype") as caught, run.autocast(), run.autocast():
        model(X)
    assert len(caught.value.__notes__) == 1
