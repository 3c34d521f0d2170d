"""Averages and answers in the place of weights: what a block sees, and what it leaves."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError

SPLIT = "bf16, params=bf16, master=split"
POLICIES = ["fp32", SPLIT, "bf16, params=bf16, master=fp32"]


def trained(policy, *, steps=5, lookahead=True, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings["lookahead"] = nc.Lookahead(rate=0.25) if lookahead else None
    run = nc.prepare(model, optimizer, policy=policy, **settings)
    for step in range(steps):
        step_of(run, step)
    return run


def step_of(run, step):
    x = torch.linspace(-1, 1, 24).view(6, 4) * (1 + step % 3)
    with run.autocast():
        loss = run.model(x).float().square().mean()
    run.step(loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_has_the_answer_inside_and_its_weights_afterwards(policy):
    run = trained(policy)
    before = {name: value.clone() for name, value in run.fp32_state_dict().items()}
    places, answer = [p.data_ptr() for p in run.model.parameters()], run.eval_state_dict()
    with run.use_eval_weights():
        taken = run.model.state_dict()
        whole, inside = copy.deepcopy(run.model), run.eval_state_dict()
        for name, p in run.model.named_parameters():
            assert torch.equal(p, answer[name].to(p.dtype))
            assert not torch.equal(p, before[name].to(p.dtype)) or not p.any()
    assert all(torch.equal(inside[name], value) for name, value in answer.items())
    assert all(torch.equal(p, answer[name]) for name, p in whole.named_parameters())
    assert all(
        torch.equal(taken[n], answer[n].to(p.dtype)) for n, p in run.model.named_parameters()
    )
    assert all(torch.equal(value, before[name]) for name, value in run.fp32_state_dict().items())
    assert [p.data_ptr() for p in run.model.parameters()] == places  # captured steps know them


@pytest.mark.parametrize("policy", POLICIES)
def test_what_happens_inside_reaches_neither_weights_nor_leads(policy, same_state):
    def write_and_fail(run):
        with torch.no_grad():
            for p in run.model.parameters():
                p.zero_()
        raise ValueError("on purpose")

    run = trained(policy)
    before = copy.deepcopy(run.state_dict())
    with pytest.raises(ValueError, match="on purpose"), run.use_eval_weights():
        write_and_fail(run)
    assert same_state(run.state_dict(), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["fp8-delayed", "fp8-tensor", "fp32", SPLIT])
def test_steps_after_the_block_are_those_without_it(policy, mode):
    def steps(*, look):
        run = trained(policy, steps=2)
        run.model.eval()
        for step in range(3):
            step_of(run, step)
            if look:
                with mode(), run.use_eval_weights(), run.autocast():
                    run.model(torch.ones(2, 4))
        return run.eval_state_dict()

    plain, looked = steps(look=False), steps(look=True)
    assert all(torch.equal(plain[name], value) for name, value in looked.items())


@pytest.mark.parametrize("policy", POLICIES)
def test_averages_and_answers_stand_in_for_one_another_in_turns(policy):
    run = trained(policy, ema_decay=0.5)
    answer, averages = run.eval_state_dict(), run.ema_state_dict()
    before, weight = run.model[0].weight.detach().clone(), run.model[0].weight
    with run.use_ema():
        with run.use_eval_weights():
            assert torch.equal(weight, answer["0.weight"].to(weight.dtype))
            assert torch.equal(run.ema_state_dict()["0.weight"], averages["0.weight"])
        assert torch.equal(weight, averages["0.weight"].to(weight.dtype))
        assert torch.equal(run.eval_state_dict()["0.weight"], answer["0.weight"])
    assert torch.equal(weight, before)
    assert not torch.equal(answer["0.weight"], averages["0.weight"])


FORBIDDEN = {
    "step()": lambda run: step_of(run, 0),
    "set_policy()": lambda run: run.set_policy("fp32"),
    "fp32_state_dict()": lambda run: run.fp32_state_dict(),
    "state_dict()": lambda run: run.state_dict(),
    "load_state_dict()": lambda run: run.load_state_dict({}),
    "release()": lambda run: run.release(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_would_take_the_answer_for_the_weights_is_refused_inside(name):
    run = trained(SPLIT)
    with (
        run.use_eval_weights(),
        pytest.raises(ConfigError, match=r"inside use_eval_weights\(\), where the model"),
    ):
        FORBIDDEN[name](run)


def test_without_a_lookahead_point_the_weights_are_the_answer():
    run = trained(SPLIT, lookahead=False)
    before, full = run.model[0].weight.detach().clone(), run.fp32_state_dict()
    with run.use_eval_weights():
        assert torch.equal(run.model[0].weight, before)
        run.fp32_state_dict()
    answer = run.eval_state_dict()
    assert not run.has_lookahead
    assert "lookahead" not in run.stats().bytes
    assert all(torch.equal(answer[name], value) for name, value in full.items())
    answer["0.bias"].zero_()
    assert run.fp32_state_dict()["0.bias"].any()


@pytest.mark.parametrize("policy", POLICIES)
def test_release_leaves_where_gradients_were_taken_and_the_plain_model_loads_the_answer(policy):
    run = trained(policy)
    full, answer = copy.deepcopy(run.fp32_state_dict()), run.eval_state_dict()
    released = run.release()
    assert all(torch.equal(p, full[name]) for name, p in released.named_parameters())
    released.load_state_dict(answer)
    assert all(torch.equal(p, answer[name]) for name, p in released.named_parameters())


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp8-tensor", "bf16, params=bf16"])
def test_weights_and_their_average_are_judged_apart_in_one_region(policy):
    """Autocast keeps the weights that it has cast until its outermost region ends."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), 1.0), policy=policy, ema_decay=0.9)
    for _ in range(4):
        with run.autocast():
            loss = model(x).float().square().mean()
        run.step(loss)
    with torch.no_grad(), run.use_ema(), run.autocast():
        expected = model(x)
    with torch.no_grad(), run.autocast():
        raw = model(x)
        with run.use_ema():
            averaged = model(x)
        again = model(x)
    assert torch.equal(averaged, expected)
    assert torch.equal(again, raw)
    assert not torch.equal(averaged, raw)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp8-tensor", "fp16"])
def test_a_region_held_over_steps_has_the_weights_of_each(policy):
    losses = []
    for held in (True, False):
        torch.manual_seed(0)
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        run = nc.prepare(model, torch.optim.SGD(model.parameters(), 0.5), policy=policy)
        with run.autocast() if held else contextlib.nullcontext():
            for _ in range(4):
                with run.autocast():
                    loss = model(x).float().square().mean()
                run.step(loss)
                losses.append(loss.item())
    assert losses[:4] == losses[4:]
    assert losses[0] > losses[3]
