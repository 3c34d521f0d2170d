"""A run in which one layer's values outgrow its format, with and without adaptive precision."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from narrowcast.errors import DivergedError
from narrowcast.hardware import Hardware
from narrowcast.runs import (
    FindingRecord,
    HealthRecord,
    PrecisionRecord,
    StepRecord,
    same_trajectory,
)
from narrowcast.training.checkpoints.checkpoint import load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.phase_plans import plan_phases
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads import build_task, load_recipe

STEPS = 40
ADAPT = {"adapt": {"enabled": True, "cooldown": 2, "calm_steps": 12}}


class Swelling(nn.Module):
    """A layer between a factor and its inverse, growing powers of two: exact but for the range."""

    def __init__(self):
        super().__init__()
        self.rise = nn.Linear(1, 16)
        self.layer = nn.Linear(16, 16, bias=False)
        self.fall = nn.Linear(16, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        factor = self.factor()
        x = torch.tanh(self.rise(x))
        return self.fall(torch.tanh(self.layer(x * factor) / factor))

    def factor(self):
        return torch.exp2(torch.floor(self.passes).clamp(max=30))


class Surging(Swelling):
    """The same, with values that are large for a few passes and then as before."""

    def factor(self):
        surges = (self.passes >= 5) & (self.passes <= 8)
        return torch.where(surges, 2.0**18, 1.0)


class Returning(Surging):
    """The same, and then large again for good."""

    def factor(self):
        return torch.where(self.passes >= 18, 2.0**18, super().factor())


@pytest.fixture
def run(ready):
    """Train a model that swells; return records and what was prepared."""

    def go(policy, *, folder=None, resume=None, precision=None, model=Swelling, **settings):
        plain = ready().task
        torch.manual_seed(0)
        task = replace(plain, model=model())
        made = ready(
            task=task,
            steps=STEPS,
            precision={"policy": policy, **(precision or {})},
            **{"health": {"every": 1}, **settings},
        )
        records = []
        with contextlib.suppress(DivergedError):  # as one that stalls ends
            for record in train_loop(
                made.prepared, task, made.recipe, folder=folder, resume=resume
            ):
                records.append(record)
        return records, made.prepared

    return go


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


def applied(records):
    return [record.step for record in of(StepRecord, records) if record.applied]


def test_fp16_stalls_unless_the_layer_may_be_widened_and_then_training_goes_on(run):
    stalled, _ = run("fp16")
    assert max(applied(stalled)) < 20
    records, prepared = run("fp16", precision=ADAPT)
    change, *_ = of(PrecisionRecord, records)
    assert (change.module, change.before, change.after) == ("layer", "fp16", "bf16")
    assert change.reason == "its input overflows"
    assert len(applied(records)) >= STEPS - 4
    assert max(applied(records)) == STEPS
    wide, _ = run("fp32")
    last = [of(StepRecord, each)[-1].loss for each in (records, wide)]
    assert last[0] == pytest.approx(last[1], rel=0.05)
    assert prepared.plan.module("layer").policy.forward in ("bf16", "fp32")


def test_a_module_that_would_overflow_again_does_not_return(run):
    records, prepared = run("fp16", precision=ADAPT)
    moves = [(r.module, r.before, r.after) for r in of(PrecisionRecord, records)]
    assert moves == [("layer", "fp16", "bf16")]
    assert prepared.plan.module("layer").policy.forward == "bf16"
    raised = of(PrecisionRecord, records)[0].step
    assert raised + 12 < STEPS  # calm enough, in bf16
    assert [s for s in applied(records) if s >= raised] == [*range(raised, STEPS + 1)]


def test_readings_after_a_change_are_of_the_new_format(run):
    records, _ = run("fp16", precision=ADAPT)
    formats = [
        dict(zip(zip(r.module, r.role, strict=True), r.format, strict=True))["layer", "input"]
        for r in of(HealthRecord, records)
    ]
    assert formats[0] == "fp16"
    assert "bf16" in formats


def test_after_a_calm_a_module_returns_to_the_policy(run):
    records, _ = run("fp16", precision=ADAPT, model=Surging)
    moves = [(r.module, r.before, r.after) for r in of(PrecisionRecord, records)]
    assert moves == [("layer", "fp16", "bf16"), ("layer", "bf16", "fp16")]
    raised, lowered = (r.step for r in of(PrecisionRecord, records))
    assert raised == 7  # seen in step 5, in force two later
    assert lowered - raised >= 12


def test_what_a_verdict_names_is_raised_without_waiting_for_a_reading(run):
    records, _ = run("fp16", precision=ADAPT, health={"every": 35})
    change, *_ = of(PrecisionRecord, records)
    skipped = [r.step for r in of(StepRecord, records) if not r.applied]
    assert (change.module, change.reason) == ("layer", "its input overflows")
    assert change.step == skipped[0] + 2


def test_without_verdicts_readings_of_skipped_steps_decide(run):
    records, _ = run("fp16", precision=ADAPT, health={"every": 1, "diagnose": False})
    change, *_ = of(PrecisionRecord, records)
    assert (change.module, change.before, change.after) == ("layer", "fp16", "bf16")


def test_a_module_that_is_cooling_is_raised_later_in_a_row_of_bad_steps(run):
    settings = {"adapt": {"enabled": True, "cooldown": 9, "calm_steps": 3}}
    records, _ = run("fp16", precision=settings, model=Returning)
    _, lowered, again = (r.step for r in of(PrecisionRecord, records))
    assert again == lowered + 9
    row = [r.step for r in of(StepRecord, records) if not r.applied and r.step >= lowered]
    assert row == [*range(row[0], again)]
    assert again > row[0] + 2  # as it would have been without a cooldown
    assert max(applied(records)) == STEPS


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("policy", ["fp16", "fp8-delayed", "bf16"])
def test_a_rehearsed_fault_has_one_origin_and_raises_nothing(policy, value):
    fault = f"{{step: 8, module: blocks.1.mlp.down, role: output, value: {value}}}"
    recipe = load_recipe(
        "quickstart",
        [
            "model.layers=3", "model.width=32", "model.heads=2", "batch_size=4", "data.length=32",
            "data.eval_windows=4", "steps=14", "eval.every=0", "health.every=4",
            f"precision.policy={policy}", "precision.adapt.enabled=true",
            f"fault_injection=[{fault}]",
        ],
    ).recipe  # fmt: skip
    task = build_task(recipe, device=torch.device("cpu"))
    hardware = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
    planned = plan_phases(recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)[0]
    records = list(train_loop(prepare_recipe(recipe, task, plan=planned), task, recipe))
    assert [r.step for r in of(StepRecord, records) if not r.applied] == [8]
    assert 8 in [r.step for r in of(HealthRecord, records)]
    told = [(f.module, f.role) for f in of(FindingRecord, records) if f.step == 8]
    assert set(told) == {("blocks.1.mlp.down", "output")}
    assert len(told) == 2  # the fault, and the verdict
    assert of(PrecisionRecord, records) == []


class _BadData:
    """The sine, with one sample that is not finite."""

    def __init__(self, plain):
        self.plain = plain

    def __len__(self):
        return len(self.plain)

    def __getitems__(self, indices):
        x, y = self.plain.__getitems__(indices)
        x[[i == 17 for i in indices]] = torch.inf
        return x, y


def test_bad_data_raises_nothing(ready):
    plain = ready().task
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    task = replace(plain, train_data=_BadData(plain.train_data), model=model)
    made = ready(task=task, steps=26, precision={"policy": "fp16", **ADAPT}, health={"every": 1})
    records = list(train_loop(made.prepared, task, made.recipe))
    skipped = [r.step for r in of(StepRecord, records) if not r.applied]
    told = [f for f in of(FindingRecord, records) if f.step in skipped]
    assert skipped
    assert [f.why[:16] for f in told] == ["the batch itself"] * len(skipped)
    assert of(PrecisionRecord, records) == []


def test_a_resumed_run_decides_as_one_that_was_not(run, tmp_path):
    straight, one = run("fp16", precision=ADAPT)
    run("fp16", precision=ADAPT, folder=tmp_path, checkpoint={"every": 1, "keep": STEPS})
    for cut in (8, 11, 14, 17, 20, 23):
        state = load_checkpoint(tmp_path / "checkpoints" / f"step-{cut:06d}")
        rest, other = run("fp16", precision=ADAPT, resume=state)
        expected = [record for record in straight if record.step > cut]
        assert all(same_trajectory(a, b) for a, b in zip(expected, rest, strict=True)), cut
        assert first_difference(one.state_dict(), other.state_dict()) is None, cut


@pytest.mark.parametrize("end", [17, 18, 19])
def test_what_overflowed_in_one_phase_widens_nothing_in_the_next(run, end):
    # fp16 ends between 16 and 18 passes; in bf16 the same values are fine.
    phases = ({"policy": "fp16", "until": end}, {"policy": "bf16"})
    records, _ = run("fp16", precision={**ADAPT, "schedule": phases})
    changes = [(r.step, r.module) for r in of(PrecisionRecord, records) if r.step > end]
    assert changes == [(end + 1, "*")]


def test_adaptive_precision_needs_readings(ready):
    with pytest.raises(ValueError, match=r"Write health\.every=50"):
        ready("fp16", precision={"policy": "fp16", **ADAPT}, health={"every": 0})
