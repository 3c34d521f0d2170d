"""What a run returns of its state is a copy: training on changes none of it."""

import copy
import itertools

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.precision.nested import map_tensors, tensors_in

POLICIES = [
    "fp32",
    "bf16",
    "fp16",
    "fp8-delayed",
    "aggressive",
    *(f"bf16, params=bf16, master={kind}" for kind in ("fp32", "split", "kahan", "stochastic")),
    "bf16-pure",
]
OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.02),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.02, momentum=0.9),
}
EXTRAS = {
    "plain": {},
    "averaged": {"ema_decay": 0.9},
    "ahead": {"lookahead": nc.Lookahead()},
}
CASES = [
    *itertools.product(POLICIES, ["adamw"], ["plain"]),
    *itertools.product(["fp32", POLICIES[6]], ["momentum"], ["averaged"]),
    *itertools.product(["fp32", POLICIES[6]], ["adamw"], ["ahead"]),
]


class Tied(nn.Module):
    """Weights that are tied, a batch norm with its buffers, and a weight that is frozen."""

    def __init__(self):
        super().__init__()
        self.inner, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again.weight = self.inner.weight
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.again(self.inner(x).tanh())))


def made(policy, optimizer="adamw", extra="plain"):
    torch.manual_seed(0)
    model = Tied()
    trained = [p for p in model.parameters() if p.requires_grad]
    return nc.prepare(model, OPTIMIZERS[optimizer](trained), policy=policy, **EXTRAS[extra])


def go_on(run, *, seed, steps=4):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        with run.autocast():
            loss = run.model(torch.randn(32, 16, generator=generator)).float().square().mean()
        run.step(loss)


def frozen_copy(value):
    return map_tensors(copy.copy(value), lambda tensor: tensor.clone())


def same(one, other):
    a, b = list(tensors_in(one)), list(tensors_in(other))
    assert len(a) == len(b) > 0
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("policy", "optimizer", "extra"), CASES)
def test_a_state_goes_back_to_where_it_was_taken(policy, optimizer, extra):
    run = made(policy, optimizer, extra)
    go_on(run, seed=1)
    state, weights = run.state_dict(), run.fp32_state_dict()
    answer = run.eval_state_dict()
    before = frozen_copy(state), frozen_copy(weights), frozen_copy(answer)
    go_on(run, seed=2)
    straight = run.fp32_state_dict()
    assert not same(straight, weights)
    assert all(map(same, (state, weights, answer), before))
    run.load_state_dict(state)
    assert same(run.fp32_state_dict(), weights)
    go_on(run, seed=2)
    assert same(run.fp32_state_dict(), straight)
    assert same(state, before[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_written_to_full_weights_leaves_the_run_alone(policy):
    run = made(policy)
    go_on(run, seed=1)
    expected = frozen_copy(run.fp32_state_dict())
    for tensor in [*tensors_in(run.fp32_state_dict()), *tensors_in(run.state_dict())]:
        tensor.zero_()
    assert same(run.fp32_state_dict(), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_tied_weights_are_one_tensor_in_what_is_returned(policy):
    weights = made(policy).fp32_state_dict()
    assert weights["inner.weight"].data_ptr() == weights["again.weight"].data_ptr()


@pytest.mark.parametrize("policy", POLICIES)
def test_reptile_ends_where_it_does_with_copies_made_by_hand(policy):
    ends = []
    for by_hand in (False, True):
        run = made(policy)
        for task in range(3):
            start = run.fp32_state_dict()
            start = copy.deepcopy(start) if by_hand else start
            go_on(run, seed=task)
            there = run.fp32_state_dict()
            blended = {
                name: torch.lerp(start[name], there[name], 0.5) if there[name].is_floating_point()
                else there[name]
                for name in there
            }  # fmt: skip
            run.model.load_state_dict(blended)
        ends.append(run.fp32_state_dict())
    assert same(*ends)


def test_counts_that_were_returned_stay_what_they_were():
    run = made("fp16")
    go_on(run, seed=1, steps=2)
    stats = run.stats()
    go_on(run, seed=2, steps=3)
    assert (stats.steps, run.stats().steps) == (2, 5)
