"""Rows per product that a run learns from its first training batch, before it is compiled."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.hardware import Hardware, Speeds, Support
from narrowcast.kernels.launch import interpreted
from narrowcast.precision.fp8.linear import Fp8Linear

pytestmark = [
    pytest.mark.usefixtures("fp8_products"),
    pytest.mark.skipif(not interpreted(), reason="kernels of a CPU need the interpreter"),
]

# fp8 takes twice the time of bf16 at 16 rows, and half of it at 64, whatever the width.
SPEEDS = Speeds(
    gpu="a CPU",
    torch="2.13.0",
    date="2026-01-31",
    tokens=(16, 64),
    inputs=(16,),
    outputs=(16,),
    seconds={"bf16": (1.0, 1.0), "tensor": (2.0, 0.5), "delayed": (2.0, 0.5)},
)


def hardware():
    native = Support(how="native", reason="claimed")
    products = dict.fromkeys(("fp32", "bf16", "e4m3", "e5m2"), native)
    made = Hardware(device="cpu", name="a CPU", memory_bytes=2**30, products=products)
    return dataclasses.replace(made, speeds=SPEEDS)


class Pooled(nn.Module):
    """Two layers over all tokens, and one over what is left of each sequence."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.calls is not None:
            self.calls += 1
        x = self.down(F.relu(self.up(self.drop(x))))
        return self.last(x.mean(1))


def prepared(policy="fp8-delayed", **settings):
    torch.manual_seed(0)
    model = Pooled()
    plan = nc.plan(model, policy, hardware=hardware(), **settings)
    return nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy=plan)


def batch(seed=0, length=8):
    return torch.randn(8, length, 16, generator=torch.Generator().manual_seed(seed))


def step(run, model=None, **settings):
    with run.autocast():
        loss = (run.model if model is None else model)(batch(**settings)).float().square().mean()
    return run.step(loss)


def narrow(run):
    return {name for name, m in run.model.named_modules() if isinstance(m, Fp8Linear)}


def test_layers_leave_fp8_that_have_too_few_rows_in_the_first_batch():
    run = prepared()
    assert narrow(run) == {"up", "down", "last"}  # 8,192 rows are assumed
    assert "8,192 per product, assumed" in str(run.plan)
    step(run)
    assert narrow(run) == {"up", "down"}
    assert "8 to 64 per product, learned" in str(run.plan)
    assert run.plan.module("last").reason.endswith("fp8 gains nothing at 8×16×16 (0.50 ×)")


def test_rows_that_were_passed_are_not_learned():
    run = prepared(gemm_rows=64)
    step(run, length=1)
    assert narrow(run) == {"up", "down", "last"}
    assert run.plan.rows.source == "given"


def test_a_plan_with_a_batch_is_the_plan_of_a_run_with_that_batch():
    torch.manual_seed(0)
    plan = nc.plan(Pooled(), "fp8-delayed", hardware=hardware(), batch=batch())
    run = prepared()
    step(run)
    assert plan.modules == run.plan.modules
    assert plan.memory.predicted is not None


def test_formats_stay_after_the_first_step():
    run = prepared()
    step(run)
    step(run, length=1)
    assert narrow(run) == {"up", "down"}


def test_a_run_that_learns_takes_the_steps_of_one_that_knew(same_state):
    learning = prepared()
    knowing = prepared(gemm_rows=dataclasses.replace(_learned(), source="given"))
    for run in (learning, knowing):
        torch.manual_seed(1)
        for seed in range(3):
            step(run, seed=seed)
    mine, other = learning.state_dict(), knowing.state_dict()
    for part in ("rows", "outline"):
        del mine[part], other[part]
    assert same_state(mine, other)


def _learned():
    run = prepared()
    step(run)
    return run.plan.rows


def test_an_evaluation_before_the_first_step_decides_nothing():
    run = prepared()
    with torch.no_grad(), run.autocast():
        run.model(batch(length=1))
    run.model.eval()
    with run.autocast():
        run.model(batch(length=1))
    assert run.plan.rows.source == "assumed"
    run.model.train()
    step(run)
    assert narrow(run) == {"up", "down"}


@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_is_compiled_once_with_the_formats_of_its_first_batch(when):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Pooled()
    model.calls = None
    called = torch.compile(model, backend=backend) if when == "before" else model
    if when == "in place":
        model.compile(backend=backend)
    plan = nc.plan(called, "fp8-delayed", hardware=hardware(), execution="compiled")
    run = nc.prepare(called, torch.optim.AdamW(called.parameters(), lr=0.01), policy=plan)
    if when == "after":
        called = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(3):
        step(run, called, seed=seed)
    assert run.plan.rows.source == "learned"
    assert len(compiled) == 1


def test_a_function_that_calls_the_model_is_compiled_whole_and_learns_nothing():
    torch._dynamo.reset()
    run = prepared("fp8-tensor")
    run.model.calls = None

    @torch.compile(fullgraph=True, backend="eager")
    def call(x):
        return run.model(x).float().square().mean()

    with run.autocast():
        loss = call(batch())
    run.step(loss)
    assert run.plan.rows.source == "assumed"
    assert narrow(run) == {"up", "down", "last"}


def test_a_resumed_run_has_the_formats_of_the_first_batch_of_the_run(same_state):
    first = prepared()
    step(first)
    saved = first.state_dict()
    resumed = prepared()
    resumed.load_state_dict(copy.deepcopy(saved))
    assert narrow(resumed) == {"up", "down"}
    for run in (first, resumed):
        torch.manual_seed(2)
        step(run, seed=5, length=1)
    assert same_state(first.state_dict(), resumed.state_dict())


def test_a_state_that_cannot_be_loaded_leaves_formats_and_scales(same_state):
    first, other = prepared(), prepared()
    step(first)
    saved = first.state_dict()
    saved["master"] = None
    before = other.state_dict()
    with pytest.raises(nc.errors.CheckpointError):
        other.load_state_dict(saved)
    assert narrow(other) == {"up", "down", "last"}
    assert same_state(other.state_dict(), before)
    step(other)
    assert narrow(other) == {"up", "down"}


def test_the_policy_of_a_later_phase_has_the_rows_that_were_learned():
    run = prepared()
    step(run)
    run.set_policy("fp8-tensor")
    assert narrow(run) == {"up", "down"}


class Refusing(Pooled):
    def forward(self, x):
        if not torch.is_grad_enabled():
            raise ValueError("gradients are part of this model")
        return super().forward(x)


def test_a_model_that_needs_gradients_trains_as_assumed_and_the_log_says_why(caplog):
    torch.manual_seed(0)
    model = Refusing()
    plan = nc.plan(model, "fp8-tensor", hardware=hardware())
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=plan)
    step(run)
    assert narrow(run) == {"up", "down", "last"}
    assert "gradients are part of this model" in caplog.text
