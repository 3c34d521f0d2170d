"""Law 3: `plan` is pure. Same model, same plan, and the model is untouched."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from narrowcast.hardware import Hardware, Support, detect_hardware
from narrowcast.precision.plan.plan import make_plan

POLICIES = (
    "fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp8-tensor", "fp8-row", "fp8-delayed",
    "aggressive", "auto", "compute=mxfp8, params=bf16, master=kahan", "bf16, reduce=bf16",
)  # fmt: skip
EXCEPTIONS = ("", "; *: fp32", "; 1: fp32", "; [01]*: bf16", "; 2.*: tf32; 2.up: fp16")
HOW = st.sampled_from(["native", "emulated"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.attention = nn.MultiheadAttention(32, 2)
        self.register_buffer("mask", torch.ones(2, 2))

    def forward(self, x):
        return self.up(self.norm(x))


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(48, 32), nn.LSTM(32, 32), Block(), nn.Conv1d(4, 4, 1), nn.Linear(32, 48)
    )
    model[4].weight = model[0].weight
    return model


def snapshot(model):
    """Everything a plan might have changed: classes, attributes, identities, bits, hooks."""
    return (
        [(name, type(m), sorted(m.__dict__)) for name, m in model.named_modules()],
        [(n, id(p), p.dtype, p.requires_grad, p._version) for n, p in model.named_parameters()],
        copy.deepcopy(model.state_dict()),
    )


def assert_same(before, after):
    assert before[0] == after[0]
    assert before[1] == after[1]
    assert before[2].keys() == after[2].keys()
    assert all(torch.equal(before[2][key], after[2][key]) for key in before[2])


@settings(max_examples=60)
@given(
    policy=st.sampled_from(POLICIES),
    exceptions=st.sampled_from(EXCEPTIONS),
    hows=st.tuples(HOW, HOW, HOW, HOW, HOW),
    emulate=st.sampled_from([None, True]),
)
def test_planning_twice_gives_one_plan_and_leaves_the_model_as_it_is(
    policy, exceptions, hows, emulate
):
    names = ("tf32", "bf16", "fp16", "e4m3", "e5m2")
    products = {n: Support(how=h, reason="as drawn") for n, h in zip(names, hows, strict=True)}
    products["fp32"] = Support(how="native", reason="always")
    hardware = Hardware(device="cuda:0", name="drawn", memory_bytes=1, products=products)
    model = build()
    before = snapshot(model)
    first = make_plan(model, policy + exceptions, hardware=hardware, emulate=emulate)
    second = make_plan(model, policy + exceptions, hardware=hardware, emulate=emulate)
    assert first == second
    assert first.to_json() == second.to_json()
    assert_same(before, snapshot(model))


def test_planning_draws_no_random_number():
    state = torch.get_rng_state()
    model = build()
    torch.set_rng_state(state)
    make_plan(model, "aggressive", hardware=detect_hardware("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_the_model_has_the_same_plan(policy):
    model = build()
    hardware = detect_hardware("cpu")
    copied = copy.deepcopy(model)
    assert make_plan(model, policy, hardware=hardware) == make_plan(
        copied, policy, hardware=hardware
    )
