"""One step from where the optimizer is: skipped on the device, failed halfway, cut into buckets."""

import copy

import pytest
import torch
from torch import nn

from narrowcast.precision.weights import master
from narrowcast.precision.weights.lookahead import Lookahead, LookaheadPoint
from narrowcast.precision.weights.torch_update import LeadingStep


def given(storage="fp32", *, kind=torch.optim.AdamW, **settings):
    """Two weights with gradients and leads, one without, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(5, 7, generator=generator)) for _ in range(3)]
    point = LookaheadPoint(weights, Lookahead(storage=storage))
    for i, p in enumerate(weights):
        p.grad = torch.randn(5, 7, generator=generator) if i != 1 else None
        point.lead(i).copy_(torch.randn(5, 7, generator=generator) / 10)
    return weights, point, kind(weights, **settings)


def stepped(weights, point, optimizer, *, finite=None):
    places = {p: i for i, p in enumerate(weights)}
    LeadingStep(optimizer, point, places, finite=finite, metered=False)()
    return [p.detach().clone() for p in weights], [point.lead(i).clone() for i in range(3)]


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_a_step_is_the_optimizers_own_from_the_sum_of_weight_and_lead(storage):
    weights, point, optimizer = given(storage, weight_decay=0.1)
    before = copy.deepcopy(weights), [point.lead(i).float().clone() for i in range(3)]
    moved = [nn.Parameter(y.detach() + e) for y, e in zip(*before, strict=True)]
    for p, weight in zip(moved, weights, strict=True):
        p.grad = weight.grad
    torch.optim.AdamW(moved, weight_decay=0.1).step()
    after, leads = stepped(weights, point, optimizer)
    for i in (0, 2):
        x = before[0][i].detach() - before[1][i] * (0.1 / 0.9)
        lead = ((moved[i].detach() - x) * (0.9 * 0.95)).to(leads[i].dtype)
        # Three roundings of numbers below four, and perhaps one to a neighbour in bf16.
        near = {"rtol": 2.0**-7 if storage == "bf16" else 0.0, "atol": 3 * 2.0**-22}
        torch.testing.assert_close(leads[i], lead, **near)
        summed, z = after[i] + leads[i].float(), moved[i].detach()
        assert ((summed - z).abs() <= 2.0**-23 * (after[i].abs() + z.abs())).all()
    assert torch.equal(after[1], before[0][1])
    assert torch.equal(leads[1].float(), before[1][1])


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_a_step_skipped_on_the_device_leaves_every_bit(storage):
    weights, point, optimizer = given(storage, kind=torch.optim.AdamW, fused=True)
    before = copy.deepcopy(weights), [point.lead(i).clone() for i in range(3)]
    for p in (weights[0], weights[2]):
        p.grad[0, 0] = torch.inf
    no = torch.tensor(False)
    optimizer.grad_scale, optimizer.found_inf = None, (~no).float()
    after, leads = stepped(weights, point, optimizer, finite=no)
    assert all(map(torch.equal, after, before[0]))
    assert all(map(torch.equal, leads, before[1]))
    for p in (weights[0], weights[2]):
        p.grad[0, 0] = 1.0
    yes = torch.tensor(True)
    optimizer.found_inf = (~yes).float()
    after, leads = stepped(weights, point, optimizer, finite=yes)
    for i in (0, 2):
        assert not torch.equal(after[i], before[0][i])
        assert not torch.equal(leads[i], before[1][i])


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise ValueError("on purpose")


def test_a_step_that_raises_leaves_weights_and_leads_as_they_were():
    weights, point, optimizer = given(kind=Failing, lr=0.1)
    before = copy.deepcopy(weights), [point.lead(i).clone() for i in range(3)]
    with pytest.raises(ValueError, match="on purpose"):
        stepped(weights, point, optimizer)
    assert all(map(torch.equal, weights, before[0]))
    assert all(torch.equal(point.lead(i), before[1][i]) for i in range(3))


def test_no_bit_depends_on_how_weights_are_cut_into_buckets(monkeypatch):
    whole = stepped(*given())
    monkeypatch.setattr(master, "BUCKET", 1)
    cut = stepped(*given())
    for a, b in zip(whole, cut, strict=True):
        assert all(map(torch.equal, a, b))
