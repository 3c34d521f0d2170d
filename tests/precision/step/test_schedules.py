"""Learning-rate schedules under `prepare`, against the same ones in a plain loop."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError

METRICS = [1.0, 0.9, 0.9, 0.9, 0.95, 0.5, 0.6, 0.7, 0.8]


def parts():
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def batch(step):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def train(run, step):
    with run.autocast():
        loss = run.model(batch(step)).square().mean()
    return run.step(loss)


def test_a_plateau_moves_by_its_metric_and_no_step_moves_it():
    net, optimizer = parts()
    theirs = ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    rates = []
    for step, metric in enumerate(METRICS):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step(metric)
    again, ours = parts()
    scheduler = ReduceLROnPlateau(ours, patience=1, factor=0.5)
    run = nc.prepare(again, ours, policy="fp32", scheduler=scheduler)
    found = []
    for step, metric in enumerate(METRICS):
        found.append(train(run, step).lr)
        run.scheduler_step(torch.tensor(metric, dtype=torch.float64) if step % 2 else metric)
    assert found == rates
    assert rates[0] > rates[-1]
    assert torch.equal(net.weight, again.weight)
    assert run.schedulers == (scheduler,)


def test_several_schedules_of_one_optimizer_move_in_their_order():
    _, optimizer = parts()
    plain = [LinearLR(optimizer, total_iters=4), ExponentialLR(optimizer, 0.9)]
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for each in plain:
            each.step()
    again, ours = parts()
    mine = [LinearLR(ours, total_iters=4), ExponentialLR(ours, 0.9), ReduceLROnPlateau(ours)]
    run = nc.prepare(again, ours, policy="fp32", scheduler=mine)
    assert [train(run, step).lr for step in range(6)] == rates


def build(policy="fp16"):
    net, optimizer = parts()
    first, rest = LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 9)
    sequence = SequentialLR(optimizer, [first, rest], milestones=[2])
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return nc.prepare(net, optimizer, policy=policy, scheduler=[sequence, plateau])


def told(run, steps):
    rates = []
    for step in steps:
        rates.append(train(run, step).lr)
        run.scheduler_step(METRICS[step])
    return rates


def test_all_schedules_go_on_where_a_saved_run_stood(same_state):
    straight = build()
    told(straight, range(4))
    saved = copy.deepcopy(straight.state_dict())
    rest = told(straight, range(4, 9))
    resumed = build()
    told(resumed, range(2))
    resumed.load_state_dict(saved)
    assert told(resumed, range(4, 9)) == rest
    assert same_state(resumed.state_dict(), straight.state_dict())


def test_a_schedule_of_another_optimizer_is_refused_and_nothing_is_changed():
    net, optimizer = parts()
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match="built for a different SGD than the one passed to prepare"
    ):
        nc.prepare(net, optimizer, policy="bf16", scheduler=ExponentialLR(other, 0.9))
    assert type(net) is nn.Linear


def test_a_schedule_that_needs_to_be_told_something_is_refused():
    class ByEpoch(ExponentialLR):
        def step(self, epoch):
            super().step()

    net, optimizer = parts()
    with pytest.raises(UnsupportedError, match=r"needs `epoch`.*yourself after"):
        nc.prepare(net, optimizer, policy="bf16", scheduler=by_epoch(ByEpoch, optimizer))
    with pytest.raises(ConfigError, match=r"has no step\(\)"):
        nc.prepare(net, optimizer, policy="bf16", scheduler=object())
    assert type(net) is nn.Linear


def by_epoch(kind, optimizer):
    scheduler = kind.__new__(kind)
    scheduler.optimizer = optimizer
    return scheduler


def test_a_metric_that_nobody_waits_for_is_refused():
    net, optimizer = parts()
    run = nc.prepare(net, optimizer, policy="fp32")
    with pytest.raises(ConfigError, match="scheduler=ReduceLROnPlateau"):
        run.scheduler_step(1.0)


SCHEDULES = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 9),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=30),
    "multiplicative": lambda optimizer: MultiplicativeLR(optimizer, lambda _: 0.9),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 9)], [2]
    ),
    "chained": lambda optimizer: ChainedScheduler(
        [ConstantLR(optimizer, total_iters=2), ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_leftover_scheduler_step_raises_and_moves_nothing(kind):
    _, optimizer = parts()
    plain, rates = SCHEDULES[kind](optimizer), []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    net, ours = parts()
    scheduler = SCHEDULES[kind](ours)
    run = nc.prepare(net, ours, policy="fp32", scheduler=scheduler)
    found = []
    for step in range(6):
        found.append(train(run, step).lr)
        for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
            with pytest.raises(ConfigError, match=r"run\.step\(\) already steps.*Delete the call"):
                each.step()
    assert found == rates
    assert isinstance(scheduler, type(plain))


def test_schedule_stepped_by_another_library_raises():
    accelerate = pytest.importorskip("accelerate.scheduler")
    net, optimizer = parts()
    scheduler = CosineAnnealingLR(optimizer, 9)
    run = nc.prepare(net, optimizer, policy="fp32", scheduler=scheduler)
    theirs = accelerate.AcceleratedScheduler(scheduler, [], step_with_optimizer=False)
    train(run, 0)
    with pytest.raises(ConfigError, match=r"CosineAnnealingLR\.step\(\) was called"):
        theirs.step()


def test_scheduler_state_loads_and_copies_under_prepare():
    net, optimizer = parts()
    scheduler = CosineAnnealingLR(optimizer, 9)
    run = nc.prepare(net, optimizer, policy="fp32", scheduler=scheduler)
    train(run, 0)
    assert scheduler.state_dict().keys() == SCHEDULES["cosine"](parts()[1]).state_dict().keys()
    for twin in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert type(twin) is CosineAnnealingLR
        twin.step()
    assert scheduler.last_epoch == 1
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 5})
    train(run, 1)
    assert scheduler.last_epoch == 6


def test_schedules_are_free_again_after_release_or_outside_prepare():
    net, optimizer = parts()
    given, apart = ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, 0.5)
    run = nc.prepare(net, optimizer, policy="fp32", scheduler=given)
    train(run, 0)
    apart.step()
    assert (given.last_epoch, apart.last_epoch) == (1, 1)
    run.release()
    given.step()
    assert type(given) is ExponentialLR
    assert given.last_epoch == 2


def test_plateau_stepped_directly_and_by_the_run_raises():
    net, optimizer = parts()
    scheduler = ReduceLROnPlateau(optimizer)
    run = nc.prepare(net, optimizer, policy="fp32", scheduler=scheduler)
    train(run, 0)
    scheduler.step(1.0)  # alone it moves the schedule once
    run.scheduler_step(0.9)
    with pytest.raises(ConfigError, match=r"run\.scheduler_step\(\) already steps"):
        scheduler.step(0.9)
    assert scheduler.last_epoch == 2


def test_an_optimizer_that_finds_its_own_rate_trains_as_it_would_alone():
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    net, _ = parts()
    plain = adafactor(net.parameters())
    again, _ = parts()
    run = nc.prepare(again, adafactor(again.parameters()), policy="fp32")
    for step in range(4):
        plain.zero_grad()
        net(batch(step)).square().mean().backward()
        plain.step()
        outcome = train(run, step)
        assert outcome.applied
        assert math.isnan(outcome.lr)
    assert torch.equal(net.weight, again.weight)
    narrow, _ = parts()
    run = nc.prepare(narrow, adafactor(narrow.parameters()), policy="bf16, params=bf16")
    for step in range(4):
        assert train(run, step).applied
    # Four relative steps in gradients of bf16: alike to a few of their spacings.
    assert torch.allclose(run.fp32_state_dict()["weight"], net.weight, rtol=0.05, atol=0.01)


def test_an_optimizer_without_any_rate_trains():
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p -= 2**-6 * p.grad.sign()

    net, _ = parts()
    before = net.weight.detach().clone()
    run = nc.prepare(net, SignDescent(net.parameters()), policy="bf16, params=bf16, master=split")
    outcome = train(run, 0)
    assert math.isnan(outcome.lr)
    moved = (run.fp32_state_dict()["weight"] - before).abs()
    assert torch.allclose(moved, torch.tensor(2.0**-6), rtol=2**-16)
