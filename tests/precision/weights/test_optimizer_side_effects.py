"""Optimizers that write weights by themselves, under every kind of master, against plain torch."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError

schedulefree = pytest.importorskip("schedulefree")
MASTERS = ("fp32", "split", "kahan", "stochastic", "none")
EXACT = ("fp32", "split")
KINDS = {
    "adamw": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01, warmup_steps=2),
    "adamw one by one": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01, foreach=False),
    "sgd": lambda p: schedulefree.SGDScheduleFree(p, lr=0.1, weight_decay=0.01),
    "radam": lambda p: schedulefree.RAdamScheduleFree(p, lr=0.01),
}
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def given_loss(net, step):
    """One whose gradients no weight decides, and bf16 holds exactly."""
    given = [(torch.arange(p.numel()).view(p.shape) + step).sin() for p in net.parameters()]
    pairs = zip(net.parameters(), given, strict=True)
    return sum((p * gradient.bfloat16().to(p.dtype)).sum() for p, gradient in pairs)


def alternate(net, optimizer, take):
    """Train and evaluate in turns; return what the model held in each evaluation."""
    seen = []
    for step in range(6):
        optimizer.train()
        take(step)
        if step % 2:
            optimizer.eval()
            seen.append({name: p.detach().float().clone() for name, p in net.named_parameters()})
    return seen


def plain(kind, loss_of):
    net = model()
    optimizer = KINDS[kind](net.parameters())

    def take(step):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()

    return net, alternate(net, optimizer, take)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_free_optimizer_in_fp32_is_the_plain_one_bit_for_bit(kind):
    def loss_of(net, step):
        return net(X * (step + 1)).square().mean()

    theirs, wanted = plain(kind, loss_of)
    net = model()
    optimizer = KINDS[kind](net.parameters())
    run = nc.prepare(net, optimizer, policy="fp32")
    seen = alternate(net, optimizer, lambda step: run.step(loss_of(net, step)))
    for a, b in zip(seen, wanted, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    assert all(map(torch.equal, net.parameters(), theirs.parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("master", MASTERS)
def test_train_and_eval_reach_working_and_master_weights(kind, master):
    theirs, wanted = plain(kind, given_loss)
    net = model()
    optimizer = KINDS[kind](net.parameters())
    run = nc.prepare(
        net, optimizer, policy=f"fp32, params=bf16, master={master}", lost_updates_every=1
    )
    losses = []

    def take(step):
        losses.append(run.step(given_loss(net, step)).lost_updates)

    seen = alternate(net, optimizer, take)
    for a, b in zip(seen, wanted, strict=True):
        for name, value in b.items():
            # Working weights are the full ones, rounded; without digits beside them they drift.
            drift = 0 if master in EXACT else 2**-7 if master == "kahan" else 0.1
            assert torch.allclose(a[name], value, rtol=2**-8 + drift, atol=drift + 1e-6), name
    if master in EXACT:
        full = run.fp32_state_dict()
        assert all(torch.equal(full[name], p) for name, p in theirs.named_parameters())
    assert losses[-1] < 1
    released = run.release()
    assert all(p.dtype == torch.float32 for p in released.parameters())
    optimizer.train()
    optimizer.eval()
    assert "train" not in vars(optimizer)


def test_a_schedule_free_run_goes_on_bit_for_bit_from_either_mode(same_state):
    def made():
        net = model()
        optimizer = KINDS["adamw"](net.parameters())
        return nc.prepare(net, optimizer, policy="bf16, params=bf16, master=split")

    def train(run, steps):
        run.optimizer.train()
        for step in steps:
            run.step(given_loss(run.model, step))
        run.optimizer.eval()

    straight, resumed = straight_and_resumed(made, train)
    assert same_state(resumed.state_dict(), straight.state_dict())


def straight_and_resumed(made, train):
    """Return a run of six steps, and one that takes up where it stood after three."""
    straight = made()
    train(straight, range(3))
    saved = copy.deepcopy(straight.state_dict())
    train(straight, range(3, 6))
    resumed = made()
    resumed.load_state_dict(saved)
    train(resumed, range(3, 6))
    return straight, resumed


def test_a_step_out_of_train_mode_is_refused_by_the_optimizer_and_can_be_taken_again():
    net = model()
    optimizer = KINDS["adamw"](net.parameters())
    run = nc.prepare(net, optimizer, policy="bf16, params=bf16, master=split")
    before = {name: value.clone() for name, value in run.fp32_state_dict().items()}
    with pytest.raises(Exception, match="not in train mode"):
        run.step(given_loss(net, 0))
    assert all(torch.equal(value, before[name]) for name, value in run.fp32_state_dict().items())
    optimizer.train()
    run.optimizer.zero_grad()
    assert run.step(given_loss(net, 0)).applied


def test_eval_inside_averaged_is_refused():
    net = model()
    optimizer = KINDS["adamw"](net.parameters())
    run = nc.prepare(net, optimizer, policy="bf16, params=bf16", ema_decay=0.9)
    with run.use_ema(), pytest.raises(ConfigError, match=r"optimizer.eval\(\) was called inside"):
        optimizer.eval()


def test_an_optimizer_whose_step_needs_a_closure_is_refused():
    net = model()
    optimizer = schedulefree.AdamWScheduleFreeClosure(net.parameters(), lr=0.01)
    with pytest.raises(UnsupportedError, match=r"needs `closure`.*needs no closure"):
        nc.prepare(net, optimizer, policy="bf16")
    assert type(net[0]) is nn.Linear


class Clamping(torch.optim.SGD):
    """One with a method of its own that writes weights, and one that its step calls."""

    @torch.no_grad()
    def clamp(self, bound):
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-bound, bound)

    def prepare_step(self):
        return [p.shape for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        assert all(shape.numel() > 0 for shape in self.prepare_step())
        return super().step(closure)


@pytest.mark.parametrize("master", MASTERS)
def test_any_method_that_writes_weights_is_followed(master):
    net = model()
    optimizer = Clamping(net.parameters(), lr=0.1)
    run = nc.prepare(net, optimizer, policy=f"fp32, params=bf16, master={master}")
    run.step(given_loss(net, 0))
    optimizer.clamp(2**-6)
    assert all((value.abs() <= 2**-6).all() for value in run.fp32_state_dict().values())
    assert all((p.abs() <= 2**-6).all() for p in net.parameters())


class ListKeeper(torch.optim.Optimizer):
    """Keeps its weights in a list of its own, as hand-written ones do."""

    def __init__(self, params, keep=lambda params: params):
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.kept = keep(params)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.kept:
            if p.grad is not None:
                p -= 0.1 * p.grad


class Holder:
    def __init__(self, params):
        self.params = params


def closing_over(params):
    return lambda: params[0]


KEEPERS = {
    "a list": list,
    "a dict": lambda params: {"fast": dict(enumerate(params))},
    "a closure": closing_over,
    "an object": Holder,
    "an optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_an_optimizer_with_weights_beside_its_groups_is_refused_before_anything_changes(keep):
    net = model()
    optimizer = ListKeeper(net.parameters(), keep)
    with pytest.raises(UnsupportedError, match=r"ListKeeper holds weights of the model in `kept`"):
        nc.prepare(net, optimizer, policy="bf16, params=bf16")
    assert all(type(module) in (nn.Sequential, nn.Linear, nn.Tanh) for module in net.modules())
    assert all(p.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp32, params=bf16, master=none"])
def test_it_trains_where_it_may_write_to_the_weights_themselves(policy):
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    run = nc.prepare(net, ListKeeper(net.parameters()), policy=policy)
    run.step(given_loss(net, 0))
    assert not any(map(torch.equal, before, net.parameters()))
    wide = nc.plan(net, "bf16, params=bf16", hardware=run.plan.hardware)
    with pytest.raises(UnsupportedError, match="outside its param_groups"):
        run.set_policy(wide)


class Slow(torch.optim.Optimizer):
    """Wraps another optimizer without torch's own beginnings, as those of libraries do."""

    def __init__(self, inner):
        self.inner, self.slow = inner, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = (
            OrderedDict(),
            OrderedDict(),
        )
        self._patch_step_function()
        self.defaults, self.state = inner.defaults, inner.state

    @property
    def param_groups(self):
        return self.inner.param_groups

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": dict(self.slow)}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.slow = dict(state["slow"])

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
            self.slow[i] = p.clone() if i not in self.slow else self.slow[i].lerp(p, 0.5)
            p.copy_(self.slow[i])


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_an_optimizer_that_wraps_another_trains_and_goes_on_bit_for_bit(policy, same_state):
    def made():
        net = model()
        return nc.prepare(net, Slow(torch.optim.AdamW(net.parameters(), lr=1e-2)), policy=policy)

    def train(run, seeds):
        for seed in seeds:
            assert run.step(given_loss(run.model, seed)).applied

    run, resumed = straight_and_resumed(made, train)
    assert same_state(resumed.state_dict(), run.state_dict())
    with pytest.raises(ConfigError, match=r"optimizer.step\(\) was called after prepare"):
        run.optimizer.step()
    if policy == "fp32":
        plain = model()
        optimizer = Slow(torch.optim.AdamW(plain.parameters(), lr=1e-2))
        for seed in range(6):
            optimizer.zero_grad()
            given_loss(plain, seed).backward()
            optimizer.step()
        assert all(map(torch.equal, plain.parameters(), run.model.parameters()))


class Idle(torch.optim.SGD):
    """Steps without moving anything."""

    def step(self, closure=None):
        return None


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        ("fp32", "param_groups"),
        ("bf16, params=bf16", "param_groups"),
        ("bf16-pure", "write master=split"),
    ],
)
def test_a_step_that_moves_nothing_is_a_finding_once(policy, advice):
    net = model()
    run = nc.prepare(net, Idle(net.parameters(), lr=0.1), policy=policy, lost_updates_every=2)
    for step in range(6):
        assert run.step(given_loss(net, step)).applied
    found = run.findings()
    assert [(each.what, each.step) for each in found] == [("no weight moved", 1)]
    assert advice in found[0].advice


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16", "bf16-pure"])
def test_a_step_that_moves_some_or_is_told_to_move_none_is_no_finding(policy):
    net = model()
    for lr in (0.5, 0.0):
        run = nc.prepare(net, torch.optim.SGD(net.parameters(), lr=lr), policy=policy)
        run.step(given_loss(net, 0))
        assert run.findings() == []
        run.release()


@pytest.mark.parametrize(
    ("policy", "told"), [("fp32", 0), ("bf16, params=bf16, master=split", 0), ("bf16-pure", 1)]
)
def test_a_rate_below_the_digits_of_fp32_that_moves_nothing_is_a_finding_only_without_them(
    policy, told
):
    net = model()
    run = nc.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-30), policy=policy)
    run.step(given_loss(net, 0))
    assert len(run.findings()) == told


@pytest.mark.parametrize("average", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.75)}])
@pytest.mark.parametrize("policy", ["fp32", "fp32, params=bf16, master=split"])
def test_torch_s_averaged_model_averages_full_weights(policy, average):
    """As docs/guides/master-weights.md says: of copies, which have every digit."""
    net, theirs = model(), model()
    net.insert(1, nn.BatchNorm1d(16))
    theirs.insert(1, nn.BatchNorm1d(16))
    run = nc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), policy=policy)
    averaged, wanted = AveragedModel(net, **average), AveragedModel(theirs, **average)
    plain_sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(5):
        run.step(given_loss(net, step))
        averaged.update_parameters(copy.deepcopy(net))
        plain_sgd.zero_grad()
        given_loss(theirs, step).backward()
        plain_sgd.step()
        wanted.update_parameters(theirs)
    for each in (averaged, wanted):
        update_bn([X, X + 1], each)
    assert averaged.state_dict().keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        assert torch.equal(averaged.state_dict()[name], value), name
