"""Passes that leave no trace of themselves."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.precision.step.buffers import preserve_grads_and_buffers


class Counting(nn.Module):
    """Puts a new tensor in its buffer's place at every call, and has a batch norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.norm(x)


def test_gradients_and_buffers_are_the_same_tensors_with_the_same_values():
    model = Counting()
    model(torch.randn(8, 4)).square().sum().backward()
    held = {name: (t, t.clone()) for name, t in model.named_buffers()}
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    with preserve_grads_and_buffers(model):
        assert all(p.grad is None for p in model.parameters())
        model(torch.full((8, 4), float("nan"))).sum().backward()
        assert model.norm.running_mean.isnan().all()
    for name, tensor in model.named_buffers():
        assert tensor is held[name][0]
        assert torch.equal(tensor, held[name][1])
    for p, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)


def test_scales_of_another_step_are_in_force_inside_and_gone_afterwards():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp16", scale_groups=["1"])
    assert [v.item() for v in run.engine.scale_values()] == [2.0**16, 1.0]
    with run.engine.isolated([torch.tensor(8.0), torch.tensor(4.0)]):
        assert [v.item() for v in run.engine.scale_values()] == [8.0, 4.0]
        with run.autocast():
            loss = model(torch.ones(2, 4)).sum()
        run.backward(loss)
        # The bias of the last layer: two rows, the scale of the loss and that of its part.
        assert model[1].bias.grad.tolist() == [2 * 8.0 * 4.0] * 4
    assert [v.item() for v in run.engine.scale_values()] == [2.0**16, 1.0]


def test_a_bad_pass_aside_of_several_losses_lowers_no_scale():
    model = nn.Linear(4, 4)
    scales = {"a": nc.LossScale(), "b": nc.LossScale()}
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp16", loss_scale=scales
    )
    for aside in (True, False):
        x = torch.full((2, 4), float("inf") if aside else 1.0)
        for name in scales:
            with run.autocast():
                loss = model(x).mean()
            if aside:
                with run.engine.isolated():
                    run.backward(loss, name=name)
            else:
                run.backward(loss, name=name)
    assert run.step().applied
    assert [v.item() for v in run.engine.scale_values()] == [2.0**16] * 2


@pytest.mark.parametrize("policy", ["fp32", "fp8-delayed"])
def test_an_error_inside_gives_everything_back_too(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    before = model[1].running_mean.clone()

    def broken():
        with run.engine.isolated(), run.autocast():
            model(torch.randn(8, 16))
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        broken()
    assert torch.equal(model[1].running_mean, before)
