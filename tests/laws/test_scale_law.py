"""Law 5: the loss scale is a power of two within its bounds whatever the history, never zero."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import narrowcast as nc
from narrowcast.precision.gradients.loss_scale import LossScale, RunningScale

POWERS = st.integers(-20, 60)


@st.composite
def scale_settings(draw):
    low, middle, high = sorted(draw(st.tuples(POWERS, POWERS, POWERS)))
    return LossScale(
        init_scale=2.0**middle,
        min_scale=2.0**low,
        max_scale=2.0**high,
        growth_factor=2.0 ** draw(st.integers(1, 3)),
        backoff_factor=2.0 ** -draw(st.integers(1, 3)),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 3)),
        dynamic=draw(st.booleans()),
    )


def reference(chosen, history):
    """The same rule in exact arithmetic, written down from its description."""
    value, calm, strikes, seen = chosen.init_scale, 0, 0, []
    for finite in history:
        if chosen.dynamic and finite:
            strikes, calm = 0, calm + 1
            if calm == chosen.growth_interval:
                value, calm = min(value * chosen.growth_factor, chosen.max_scale), 0
        elif chosen.dynamic:
            calm, strikes = 0, strikes + 1
            if strikes >= chosen.hysteresis:
                value = max(value * chosen.backoff_factor, chosen.min_scale)
        seen.append(value)
    return seen


@given(chosen=scale_settings(), history=st.lists(st.booleans(), max_size=100))
def test_the_scale_follows_its_rule_and_stays_a_power_of_two_within_its_bounds(chosen, history):
    scale = RunningScale(chosen, torch.device("cpu"))
    seen = []
    for finite in history:
        scale.update(torch.tensor(finite))
        value = float(scale.value)
        assert 0 < chosen.min_scale <= value <= chosen.max_scale
        assert math.log2(value).is_integer()
        seen.append(value)
    assert seen == reference(chosen, history)


@settings(max_examples=25)
@given(
    history=st.lists(st.sampled_from([1.0, math.inf, math.nan]), max_size=30),
    parts=st.sampled_from([[], ["0"], ["0", "2"]]),
)
def test_every_scale_of_a_run_obeys_whatever_happens(history, parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    run = nc.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        policy="fp32",
        loss_scale=LossScale(init_scale=4.0, growth_interval=2),
        scale_groups=parts,
        max_skipped_steps=1000,
    )
    for factor in history:
        run.step(model(torch.ones(2, 4)).sum() * factor)
        saved = run.state_dict()["scales"]
        for scale in (*saved["losses"].values(), *saved["parts"].values()):
            value = float(scale["value"])
            assert value > 0
            assert math.log2(value).is_integer()
    assert all(p.isfinite().all() for p in model.parameters())


def two_hundred_overflows_then_a_good_batch(step):
    for _ in range(200):
        step(math.inf)
    step(1.0)


def test_torchs_own_scaler_reaches_zero_and_writes_nan():
    """FIELD 3.1, the reason for the law: if torch mends it, this test should go."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step(factor):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    two_hundred_overflows_then_a_good_batch(step)
    assert scaler.get_scale() == 0.0
    assert weight.isnan().all()


def test_two_hundred_overflows_leave_our_weights_finite_and_training():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp16", max_skipped_steps=1000)
    seen = []

    def step(factor):
        outcome = run.step((model.weight * factor).sum())
        seen.append((outcome.applied, model.weight.detach().clone()))

    two_hundred_overflows_then_a_good_batch(step)
    assert all(not applied and (w == 1).all() for applied, w in seen[:200])
    assert seen[200][0]
    assert torch.equal(model.weight.detach(), torch.full((3,), 1.0) - 0.1)
    assert float(run.state_dict()["scales"]["losses"]["loss"]["value"]) == 1.0
