"""Copies of a prepared model: plain, whole, and free to be prepared themselves."""

import copy
import io
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

GENERATOR = torch.Generator().manual_seed(23)
X = torch.randn(16, 32, generator=GENERATOR)
Y = torch.randint(0, 16, (16,), generator=GENERATOR)
POLICIES = ["fp32", "bf16", "fp16", "fp8-delayed", "bf16, params=bf16, master=split", "aggressive"]


def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(run):
    with run.autocast():
        loss = F.cross_entropy(run.model(X).float(), Y)
    assert run.step(loss).applied


def saved_whole(model):
    """What `torch.save(model, …)` and `torch.load(…, weights_only=False)` make of it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_whole,
}


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_is_the_plain_model_with_all_digits(make, policy):
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, policy=policy, loss_scale=nc.LossScale(init_scale=256.0))
    step(run)
    made = make(model)
    wanted = {name: value.clone() for name, value in run.fp32_state_dict().items()}
    check_equal(state_of(made), wanted)
    plain, _ = classifier()
    assert [type(m) for m in made.modules()] == [type(m) for m in plain.modules()]
    plain.load_state_dict(wanted)
    assert torch.equal(made.eval()(X), plain.eval()(X))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_can_be_prepared_and_neither_touches_the_other(make, policy):
    model, optimizer = classifier()
    settings = {"policy": policy, "loss_scale": nc.LossScale(init_scale=256.0)}
    run = nc.prepare(model, optimizer, **settings)
    step(run)
    made = make(model)
    before = state_of(model)
    again = nc.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2), **settings)
    step(again)
    check_equal(state_of(model), before)
    before = state_of(made)
    step(run)
    check_equal(state_of(made), before)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_leaves_the_original_to_train_on_as_if_nothing_had_been(policy):
    def three_steps(*, copied):
        model, optimizer = classifier()
        run = nc.prepare(model, optimizer, policy=policy, loss_scale=nc.LossScale(init_scale=256.0))
        for _ in range(3):
            step(run)
            if copied:
                copy.deepcopy(model)
                pickle.dumps(model)
        return {name: value.clone() for name, value in run.fp32_state_dict().items()}

    check_equal(three_steps(copied=True), three_steps(copied=False))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_released_model_goes_on_as_the_plain_loop_that_has_its_state(policy):
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, policy=policy, loss_scale=nc.LossScale(init_scale=256.0))
    step(run)
    run.release()
    plain, plain_optimizer = classifier()
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (plain, plain_optimizer)):
        its.zero_grad()
        F.cross_entropy(each(X), Y).backward()
        its.step()
    check_equal(state_of(model), state_of(plain))


NARROW = [f"bf16, params=bf16, master={kind}" for kind in ("fp32", "split", "kahan", "none")]


class TwoNames(nn.Module):
    """A weight that two layers use."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(x))


@pytest.mark.parametrize("policy", NARROW)
def test_what_another_process_is_sent_has_every_digit(policy):
    torch.manual_seed(0)
    model = TwoNames()
    run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy=policy)
    step(run)
    sent = pickle.loads(ForkingPickler.dumps(model))
    full = run.fp32_state_dict()
    assert type(sent) is TwoNames
    assert all(torch.equal(value, full[name]) for name, value in sent.state_dict().items())
    assert sent.one.weight is sent.other.weight
    assert sent(X).dtype == torch.float32


def test_a_prepared_model_is_handed_to_a_spawned_process(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
    step(run)
    process = multiprocessing.get_context("spawn").Process(
        target=torch.save, args=(model, tmp_path / "model.pt")
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    there, full = torch.load(tmp_path / "model.pt", weights_only=False), run.fp32_state_dict()
    assert all(torch.equal(value, full[name]) for name, value in there.state_dict().items())
    assert there(X).dtype == torch.float32
