import copy

import pytest
import torch
from tests.tuning.conftest import loss_fn
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.tuning.updates import UpdateMeter


def meter_for(model, batches, optimizer=None):
    return UpdateMeter(model, batches, loss_fn, optimizer=optimizer, seed=0)


def test_the_error_of_sgd_is_that_of_torch_in_bf16_weights_of_one_layer(network, batches):
    """One bf16 product, written out in torch, moves the update as measured."""
    twin = copy.deepcopy(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    meter = meter_for(network, batches[:1], optimizer)
    measured = meter.error(nc.Policy().with_exceptions({"head": "bf16"}))
    meter.close()

    def gradients(model, *, rounded):
        model.zero_grad()
        if rounded:
            model.head.forward = lambda x: Bf16Product.apply(x, model.head.weight, model.head.bias)
        loss_fn(model, batches[0]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    wide, narrow = gradients(copy.deepcopy(twin), rounded=False), gradients(twin, rounded=True)
    expected = ((narrow - wide).norm() / wide.norm()).item()
    assert measured.relative == pytest.approx(expected, rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(narrow, wide, dim=0).item()
    assert measured.cosine == pytest.approx(cosine, abs=1e-9)


class Bf16Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return bf16(bf16(x) @ bf16(weight).t() + bf16(bias))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = bf16(grad)
        return bf16(grad @ bf16(weight)), bf16(grad.t() @ bf16(x)), bf16(grad.sum(0))


def bf16(x):
    return x.bfloat16().float()


def test_adam_with_state_divides_by_its_own_second_moment(network, batches):
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.9, 0.5))
    loss_fn(network, batches[5]).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [optimizer.state[p]["exp_avg_sq"].clone() for p in network.parameters()]
    meter = meter_for(network, batches[:1], optimizer)
    measured = meter.error(nc.policy("fp8-tensor"))
    meter.close()
    plain = torch.optim.SGD(network.parameters(), lr=0.0)
    run = nc.prepare(network, plain, policy="fp8-tensor", emulate=True)
    with run.autocast():
        loss = loss_fn(network, batches[0])
    run.backward(loss)
    narrow = [p.grad.clone() for p in network.parameters()]
    run.zero_grad()
    run.release()
    loss_fn(network, batches[0]).backward()
    wide = [p.grad for p in network.parameters()]
    roots = [(second / (1 - 0.5)).sqrt() + 1e-8 for second in state]
    error = [((a - b) / root).norm() for a, b, root in zip(narrow, wide, roots, strict=True)]
    update = [(b / root).norm() for b, root in zip(wide, roots, strict=True)]
    expected = (torch.stack(error).norm() / torch.stack(update).norm()).item()
    assert measured.relative == pytest.approx(expected, rel=1e-3)


def test_errors_of_groups_add_up(network, batches):
    """The sum over single layers is the whole: what the search relies on."""
    meter = meter_for(network, batches[:3])
    names = [n for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    text = "forward=e4m3, grad_input=e5m2, grad_weight=e5m2, scaling=tensor"
    alone = [meter.error(nc.Policy().with_exceptions({name: text})).lost for name in names]
    whole = meter.error(nc.Policy().with_exceptions(dict.fromkeys(names, text))).lost
    meter.close()
    assert sum(alone) == pytest.approx(whole, rel=0.35)


def test_model_buffers_randomness_and_optimizer_are_left_as_they_were(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 16))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    meter = meter_for(model, batches[:2])
    first = meter.error(nc.policy("bf16"))
    assert meter.error(nc.policy("bf16")) == first  # dropout draws the same mask
    meter.close()
    assert type(model[0]) is nn.Linear
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_fp32_has_no_error(network, batches):
    meter = meter_for(network, batches[:2])
    assert meter.error(nc.policy("fp32")).lost < 1e-12
    meter.close()


def test_gradients_that_overflow_fp16_lose_everything(network, batches):
    with torch.no_grad():
        network.blocks[0].up.weight *= 1e6
    meter = meter_for(network, batches[:1])
    assert meter.error(nc.policy("fp16")).lost == float("inf")
    meter.close()


def test_fp16_is_measured_with_a_loss_scale_that_does_not_overflow(network, batches):
    """Gradients near 1 overflow with the first scale, which a run would lower."""
    x, y = batches[0]

    def large(model, batch):
        return 100 * loss_fn(model, batch)

    meter = UpdateMeter(network, [(x, y)], large, optimizer=None, seed=0)
    assert meter.error(nc.policy("fp16")).lost < 1e-3
    meter.close()


def test_an_unknown_optimizer_raises_before_the_model_changes(network, batches):
    class Lion(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1e-3})

    with pytest.raises(UnsupportedError, match="got Lion"):
        meter_for(network, batches[:1], Lion(network.parameters()))
    assert type(network.head) is nn.Linear


def test_a_loss_that_is_not_finite_raises_and_restores_the_model(network, batches):
    x, y = batches[0]
    with pytest.raises(ConfigError, match="inf or NaN in fp32"):
        meter_for(network, [(x * float("nan"), y)])
    assert type(network.head) is nn.Linear
