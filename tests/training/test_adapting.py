"""A run in which one layer's values outgrow its format, with and without adaptive precision."""

import copy

import pytest
import torch
from torch import nn

from narrowcast.runs import HealthRecord, PrecisionRecord, StepRecord, same_course
from narrowcast.training.checkpoint import load_checkpoint
from narrowcast.training.identity import first_difference
from narrowcast.training.trainer import train

STEPS = 40
ADAPT = {"adapt": {"enabled": True, "cooldown": 2, "calm": 12}}


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
        factor = torch.exp2(torch.floor(self.passes).clamp(max=30))
        x = torch.tanh(self.rise(x))
        return self.fall(torch.tanh(self.layer(x * factor) / factor))


@pytest.fixture
def run(ready):
    """Train the model that swells; return records and what was prepared."""

    def go(policy, *, folder=None, resume=None, precision=None, **settings):
        task = copy.copy(ready().task)
        torch.manual_seed(0)
        task.model = Swelling()
        made = ready(
            task=task,
            steps=STEPS,
            precision={"policy": policy, **(precision or {})},
            **{"health": {"every": 1}, **settings},
        )
        records = train(made.prepared, task, made.recipe, folder=folder, resume=resume)
        return list(records), made.prepared

    return go


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


def applied(records):
    return [record.step for record in of(StepRecord, records) if record.applied]


def test_without_it_fp16_stalls_and_with_it_the_layer_is_widened_and_training_goes_on(run):
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


def test_readings_after_a_change_are_of_the_new_format(run):
    records, _ = run("fp16", precision=ADAPT)
    formats = [
        dict(zip(zip(r.module, r.role, strict=True), r.format, strict=True))["layer", "input"]
        for r in of(HealthRecord, records)
    ]
    assert formats[0] == "fp16"
    assert "bf16" in formats


def test_after_a_calm_a_module_returns_to_the_policy(ready):
    # What overflows once, by a fault, is calm afterwards.
    made = ready(
        "fp16",
        steps=STEPS,
        precision={"policy": "fp16", **ADAPT},
        health={"every": 1},
        faults=({"step": 5, "module": "first", "role": "input", "value": "inf"},),
    )
    records = list(train(made.prepared, made.task, made.recipe))
    moves = [(r.module, r.before, r.after) for r in of(PrecisionRecord, records)]
    assert moves == [("first", "fp16", "bf16"), ("first", "bf16", "fp16")]
    raised, lowered = (r.step for r in of(PrecisionRecord, records))
    assert raised == 7  # seen in step 5, in force two later
    assert lowered - raised >= 12


@pytest.mark.parametrize("cut", range(8, 24, 3))
def test_a_resumed_run_decides_as_one_that_was_not(run, tmp_path, cut):
    straight, one = run("fp16", precision=ADAPT)
    run("fp16", precision=ADAPT, folder=tmp_path, checkpoint={"every": cut, "keep": 9})
    state = load_checkpoint(tmp_path / "checkpoints" / f"step-{cut:06d}")
    rest, other = run("fp16", precision=ADAPT, resume=state)
    expected = [record for record in straight if record.step > cut]
    assert all(same_course(a, b) for a, b in zip(expected, rest, strict=True))
    assert first_difference(one.state_dict(), other.state_dict()) is None


@pytest.mark.parametrize("end", [17, 18, 19])
def test_what_overflowed_in_one_phase_widens_nothing_in_the_next(run, end):
    # fp16 ends between 16 and 18 passes; in bf16 the same values are fine.
    phases = [{"policy": "fp16", "until": end}, {"policy": "bf16"}]
    records, _ = run("fp16", precision={**ADAPT, "schedule": phases})
    changes = [(r.step, r.module) for r in of(PrecisionRecord, records) if r.step > end]
    assert changes == [(end + 1, "*")]


def test_it_needs_readings(ready):
    with pytest.raises(ValueError, match=r"write health\.every=50"):
        ready("fp16", precision={"policy": "fp16", **ADAPT}, health={"every": 0})
