"""A state is taken up whole, or refused by the first thing that differs; never in part."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import narrowcast as nc
from narrowcast.errors import CheckpointError

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.01),
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01),
    "two groups": lambda net: torch.optim.AdamW(
        [{"params": net[0].parameters()}, {"params": net[1:].parameters()}], lr=0.01
    ),
    "another order": lambda net: torch.optim.AdamW(list(net.parameters())[::-1], lr=0.01),
    "two": lambda net: [
        torch.optim.AdamW(net[0].parameters(), lr=0.01),
        torch.optim.AdamW(net[1:].parameters(), lr=0.01),
    ],
}  # fmt: skip


def build(optimizer="adamw", *, policy="fp16", net=None, scheduler=ExponentialLR, **settings):
    net = model() if net is None else net
    made = OPTIMIZERS[optimizer](net)
    first = made[0] if isinstance(made, list) else made
    schedule = (
        None if scheduler is None else scheduler(first, 0.9 if scheduler is ExponentialLR else 1)
    )
    settings = {"ema_decay": 0.9, **settings}
    return nc.prepare(net, made, policy=policy, scheduler=schedule, **settings)


def train(run, steps=2):
    for step in range(steps):
        with run.autocast():
            loss = run.model(X * (step + 1)).float().square().mean()
        run.step(loss)
    return run


def frozen():
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    scheduler = ExponentialLR(optimizer, 0.9)
    return nc.prepare(net, optimizer, policy="fp16", scheduler=scheduler, ema_decay=0.9)


def wider():
    net = model()
    net[0], net[1], net[3] = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
    return build(net=net)


OTHERS = {
    "sgd": (lambda: build("sgd"), r"optimizer/0/class is SGD in the checkpoint and AdamW here"),
    "adagrad": (lambda: build("adagrad"), r"optimizer/0/class is Adagrad"),
    "two groups": (lambda: build("two groups"), r"optimizer/0/groups is a list of 2 in the"),
    "order": (lambda: build("another order"), r"optimizer/0/weights/0 is 3.bias of \(4,\) in"),
    "two": (lambda: build("two"), r"optimizer is a list of 2 in the checkpoint and a list of 1"),
    "frozen": (frozen, r"optimizer/0/weights is a list of 5 in the checkpoint and a list of 6"),
    "wider": (wider, r"weights/0.weight is float32 of \(32, 16\) in .* and float32 of \(16, 16\)"),
    "no schedule": (lambda: build(scheduler=None), r"scheduler is a list of 0"),
    "schedule": (lambda: build(scheduler=StepLR), r"scheduler/0/class is StepLR in|no .*step_size"),
    "no average": (lambda: build(ema_decay=None), r"average is nothing in the checkpoint and"),
    "parts": (lambda: build(scale_groups=["0"]), r"scales/parts/0 here"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_run_is_refused_by_what_differs_first(other, same_state):
    make, told = OTHERS[other]
    run = train(build())
    before = copy.deepcopy(run.state_dict())
    full = copy.deepcopy(run.fp32_state_dict())
    with pytest.raises(CheckpointError, match=told):
        run.load_state_dict(train(make()).state_dict())
    assert same_state(run.state_dict(), before)
    assert same_state(run.fp32_state_dict(), full)
    twin = build()
    twin.load_state_dict(before)
    assert same_state(train(run).state_dict(), train(twin).state_dict())


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key), "key"
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from leaves(item, (*path, key))
    elif isinstance(value, torch.Tensor):
        yield path, "shape"
        yield path, "dtype"
    else:
        yield path, "value"


def mutated(state, path, how):
    state = copy.deepcopy(state)
    home = state
    for key in path[:-1]:
        home = home[key]
    last = path[-1]
    if isinstance(home, tuple):
        return None
    match how:
        case "key":
            del home[last]
        case "shape":
            home[last] = torch.cat([home[last].reshape(-1), home[last].reshape(-1)])
        case "dtype":
            home[last] = home[last].to(torch.float64)
        case "value":
            home[last] = object()
    return state


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "two"])
@pytest.mark.parametrize("policy", ["fp8-delayed", "fp16, params=fp16, master=kahan"])
def test_a_state_with_anything_cut_cast_or_replaced_changes_nothing(optimizer, policy, same_state):
    saved = copy.deepcopy(train(build(optimizer, policy=policy)).state_dict())
    run = train(build(optimizer, policy=policy), 3)
    before = copy.deepcopy(run.state_dict())
    tried = 0
    for path, how in leaves(saved):
        broken = mutated(saved, path, how)
        if broken is None:
            continue
        with pytest.raises(CheckpointError):
            run.load_state_dict(broken)
        assert same_state(run.state_dict(), before), (path, how)
        tried += 1
    assert tried > 150
    run.load_state_dict(saved)
    assert same_state(run.state_dict(), saved)


@pytest.mark.parametrize("master", ["fp32", "split", "kahan", "stochastic", "none"])
def test_what_somebody_else_s_code_refuses_is_taken_back(master, same_state):
    class Fussy(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            super()._load_from_state_dict(state_dict, prefix, *rest)
            raise ValueError("not today")

    def made():
        net = model()
        net[3] = Fussy(16, 4)
        return build(policy=f"bf16, params=bf16, master={master}", net=net)

    saved = train(made()).state_dict()
    run = train(made(), 3)
    before = copy.deepcopy(run.state_dict())
    full = copy.deepcopy(run.fp32_state_dict())
    with pytest.raises(CheckpointError, match=r"not today.*the run is unchanged"):
        run.load_state_dict(saved)
    assert same_state(run.state_dict(), before)
    assert same_state(run.fp32_state_dict(), full)


def test_a_state_of_before_it_described_itself_is_refused_with_what_to_do():
    saved = train(build()).state_dict()
    del saved["outline"]
    with pytest.raises(CheckpointError, match=r"lacks outline\..* older version"):
        build().load_state_dict(saved)


def test_a_learning_rate_may_be_set_in_a_saved_state():
    saved = train(build()).state_dict()
    saved["optimizer"][0]["param_groups"][0]["lr"] = 1
    run = build()
    run.load_state_dict(saved)
    assert run.optimizer.param_groups[0]["lr"] == 1


def test_what_somebody_saves_beside_it_is_theirs():
    saved = train(build()).state_dict()
    saved["epoch"] = {"number": 3}
    build().load_state_dict(saved)


def test_a_state_goes_through_torch_s_own_files(tmp_path, same_state):
    run = train(build("two", policy="fp16, params=fp16"))
    torch.save(run.state_dict(), tmp_path / "state.pt")
    again = build("two", policy="fp16, params=fp16")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same_state(again.state_dict(), run.state_dict())


def test_a_schedule_of_ones_own_may_be_built_after_the_state_is_loaded(mlp):
    def fresh():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return nc.prepare(model, optimizer, policy="fp32"), optimizer

    run, optimizer = fresh()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    other, other_optimizer = fresh()
    other.load_state_dict(run.state_dict())
    schedule = torch.optim.lr_scheduler.LambdaLR(
        other_optimizer, lambda step: 0.5**step, last_epoch=3
    )
    assert schedule.get_last_lr() == [1e-2 * 0.5**4]


def test_a_load_that_fails_puts_weights_beside_the_model_back_too(mlp, monkeypatch):
    def fresh():
        model, beside = mlp(), torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1)
        return nc.prepare(model, optimizer, policy="fp32"), beside

    run, beside = fresh()
    with torch.no_grad():
        beside.fill_(2.0)
    state = run.state_dict()
    other, kept = fresh()

    def fails(_):
        raise RuntimeError("not this one")

    monkeypatch.setattr(other.engine.weights.masters, "load_state_dict", fails)
    with pytest.raises(CheckpointError, match="not this one"):
        other.load_state_dict(state)
    assert not kept.any()
