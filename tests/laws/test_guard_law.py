"""Law 6: no non-finite value ever enters a weight or a moment, whatever is injected, wherever."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import narrowcast as nc
from narrowcast.errors import DivergedError

POLICIES = (
    "fp32", "tf32", "bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-delayed", "bf16-pure",
    "aggressive", "bf16, params=bf16, master=kahan", "bf16, params=bf16, master=stochastic",
    "bf16, params=bf16, master=fp32, grads=fp32", "fp16, params=fp16, master=fp32",
)  # fmt: skip
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
BAD = (math.inf, -math.inf, math.nan, 1e20, -3e38, 1e38)
PLACES = ("input", "weight gradient", "bias gradient", "loss", "target", "side branch", "hidden")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.gain = nn.Parameter(torch.ones(()))  # one number: its norm is its magnitude
        self.last = nn.Linear(16, 16)
        self.side = nn.BatchNorm1d(16)
        self.inject = None

    def forward(self, x):
        h = self.batch_norm(self.first(x))
        self.side(x if self.inject != "side branch" else x * math.inf)  # no gradient comes of it
        h = h + self.attention(h[None], h[None], h[None], need_weights=False)[0][0]
        if self.inject == "hidden":
            h = h * math.inf
        return self.last(self.norm(h)) * self.gain


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def assert_all_finite(run):
    """Weights, buffers, masters, moments, averages, scales, amax histories: all that is saved."""
    for part, state in run.state_dict().items():
        assert all(t.isfinite().all() for t in tensors_of(state)), part
    for p in run.model.parameters():
        assert p.isfinite().all()


def step_with(run, place, bad):
    model, x, y = run.model, X, Y
    handles = []
    if place == "input":
        x = x.clone()
        x[3, 5] = bad
    elif place == "target":
        y = y.clone()
        y[3, 5] = bad
    elif place == "weight gradient":
        handles = [model.first.weight.register_hook(lambda g: g + bad)]
    elif place == "bias gradient":
        handles = [
            model.gain.register_hook(lambda g: torch.full_like(g, bad)),
            model.last.bias.register_hook(lambda g: g * bad),
        ]
    model.inject = place
    with run.autocast():
        loss = F.mse_loss(model(x), y)
        if place == "loss":
            loss = loss * bad
    outcome = run.step(loss)
    model.inject = None
    for handle in handles:
        handle.remove()
    return outcome


def prepared(policy, optimizer):
    torch.manual_seed(0)
    model = Model()
    return nc.prepare(
        model, optimizer(model.parameters()), policy=policy, ema_decay=0.9, clip_norm=1.0
    )


@settings(max_examples=12)
@given(
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    events=st.lists(
        st.one_of(st.none(), st.tuples(st.sampled_from(PLACES), st.sampled_from(BAD))),
        min_size=1,
        max_size=6,
    ),
)
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_is_injected_everything_stays_finite_and_training_goes_on(
    policy, optimizer, events
):
    run = prepared(policy, OPTIMIZERS[optimizer])
    for event in events:
        step_with(run, *(event or (None, 0.0)))
        assert_all_finite(run)
    for _ in range(30):  # fp16 may have to find its scale first
        outcome = step_with(run, None, 0.0)
        if outcome.applied:
            break
    assert outcome.applied
    assert_all_finite(run)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", [p for p in PLACES if p != "side branch"])
def test_a_bad_value_is_a_skipped_step_and_never_hidden(policy, place):
    run = prepared(policy, OPTIMIZERS["adamw"])
    before = {k: v.clone() for k, v in run.fp32_state_dict().items()}
    outcome = step_with(run, place, math.nan)
    assert not outcome.applied
    assert outcome.skip_reason
    after = run.fp32_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("magnitude", [1e18, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("policy", ["fp32", "bf16-pure", "bf16, params=bf16, master=split"])
def test_finite_gradients_however_large_bring_no_infinity(policy, magnitude, optimizer):
    run = prepared(policy, optimizer)
    for place in ("bias gradient", "weight gradient", "loss"):
        step_with(run, place, magnitude)
        assert_all_finite(run)


def test_torch_itself_lets_one_bad_batch_ruin_every_weight():
    """FIELD 3.4, the reason for the law."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    (model(X).square().mean() * math.inf).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert all(p.isnan().all() for p in model.parameters())


def bad_steps(run, count):
    for _ in range(count):
        step_with(run, "input", math.nan)


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp8-delayed", "aggressive"])
def test_weights_are_those_of_the_last_good_step_when_training_is_given_up(policy):
    run = prepared(policy, OPTIMIZERS["adamw"])
    for _ in range(5):
        step_with(run, None, 0.0)
    good = {k: v.clone() for k, v in run.fp32_state_dict().items()}
    with pytest.raises(DivergedError, match="the weights are those of the last applied step"):
        bad_steps(run, 100)
    assert all(torch.equal(v, good[k]) for k, v in run.fp32_state_dict().items())
