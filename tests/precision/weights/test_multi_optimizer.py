"""Two optimizers as one, against the two of torch in a plain loop, bit for bit."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.config.common_sections import OptimizerSection
from narrowcast.precision.weights.multi_optimizer import SideBySide
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.optimizers import build_optimizer
from narrowcast.training.task import ParameterGroup

STEPS = 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


def loss_of(net, step):
    x, y = batch(step)
    return (net(x) - y).square().mean()


def both(net, **settings):
    sgd = OptimizerSection(name="sgd", lr=0.05, momentum=0.9)
    groups = [
        ParameterGroup(parameters=list(net[0].parameters())),
        ParameterGroup(parameters=list(net[2].parameters()), optimizer=sgd),
    ]
    section = OptimizerSection(lr=0.01, weight_decay=0.1, **settings)
    return build_optimizer(section, net, device=torch.device("cpu"), groups=groups)


def theirs(net):
    adamw = torch.optim.AdamW(
        [
            {"params": [net[0].weight], "weight_decay": 0.1},
            {"params": [net[0].bias], "weight_decay": 0.0},
        ],
        lr=0.01,
        fused=True,
    )
    sgd = torch.optim.SGD(
        [
            {"params": [net[2].weight], "weight_decay": 0.01},
            {"params": [net[2].bias], "weight_decay": 0.0},
        ],
        lr=0.05,
        momentum=0.9,
        fused=True,
    )
    return adamw, sgd


def plain(steps=STEPS):
    net = model()
    optimizers = theirs(net)
    for step in range(steps):
        for each in optimizers:
            each.zero_grad()
        loss_of(net, step).backward()
        for each in optimizers:
            each.step()
    return net.state_dict()


@pytest.mark.parametrize("policy", ["fp32", "fp32, params=bf16, master=split"])
def test_both_take_the_steps_that_torch_s_two_would(policy):
    net = model()
    run = nc.prepare(net, both(net), policy=policy, emulate=None)
    for step in range(STEPS):
        with run.autocast():
            loss = loss_of(net, step)
        assert run.step(loss).applied
    if policy == "fp32":
        assert first_difference(run.fp32_state_dict(), dict(plain())) is None
    else:
        # bf16 weights make other gradients; that both layers learnt is what the state shows.
        assert len(run.engine.optimizer.state) == 4
        assert all(p.dtype == torch.float32 for p in run.engine.optimizer.state)


def test_a_loaded_state_goes_on_bit_for_bit():
    net = model()
    run = nc.prepare(net, both(net), policy="fp32")
    for step in range(STEPS // 2):
        run.step(loss_of(net, step))
    state = copy.deepcopy(run.state_dict())
    other = model()
    again = nc.prepare(other, both(other), policy="fp32")
    again.load_state_dict(state)
    for step in range(STEPS // 2, STEPS):
        again.step(loss_of(other, step))
    assert first_difference(again.fp32_state_dict(), dict(plain())) is None


def test_a_learning_rate_that_is_set_reaches_each_optimizer():
    net = model()
    optimizer = both(net)
    assert isinstance(optimizer, SideBySide)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: value.clone() for name, value in net.state_dict().items()}
    loss_of(net, 0).backward()
    optimizer.step()
    assert first_difference(dict(net.state_dict()), before) is None


def test_a_step_that_is_not_finite_moves_neither():
    net = model()
    run = nc.prepare(net, both(net), policy="fp32")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert not run.step(loss_of(net, 0) * torch.inf).applied
    assert first_difference(dict(net.state_dict()), before) is None


def test_one_optimizer_for_all_groups_stays_torch_s_own():
    net = model()
    groups = [ParameterGroup(parameters=list(net.parameters()))]
    found = build_optimizer(OptimizerSection(), net, device=torch.device("cpu"), groups=groups)
    assert type(found) is torch.optim.AdamW
