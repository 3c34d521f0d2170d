"""What a run reads of its tensors, and finds in it, beside training."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from narrowcast.runs import FindingRecord, HealthRecord, same_trajectory
from narrowcast.training.checkpoints.checkpoint import load_checkpoint
from narrowcast.training.train_loop import train_loop


class Growing(nn.Module):
    """A layer whose input doubles with each pass of training, which delayed scales cannot know."""

    def __init__(self):
        super().__init__()
        self.rise = nn.Linear(1, 16)
        self.layer = nn.Linear(16, 16, bias=False)
        self.fall = nn.Linear(16, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        factor = torch.exp2(self.passes)
        x = torch.tanh(self.rise(x))
        return self.fall(torch.tanh(self.layer(x * factor) / factor))


@pytest.fixture
def growing(ready):
    """Train the model that grows: `records = growing("fp8-delayed", steps=10)`."""

    def go(policy, *, folder=None, resume=None, **settings):
        plain = ready().task
        torch.manual_seed(0)
        task = replace(plain, model=Growing())
        made = ready(policy, task=task, **settings)
        return list(train_loop(made.prepared, task, made.recipe, folder=folder, resume=resume))

    return go


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


def test_saturation_under_delayed_scales_is_found_in_the_layer_that_saturates(growing):
    records = growing("fp8-delayed", steps=9, health={"every": 3})
    found = [r for r in of(FindingRecord, records) if r.what.startswith("saturation")]
    assert [(r.module, r.role, r.what) for r in found] == [("layer", "input", "saturation of e4m3")]
    own = growing("fp8-tensor", steps=9, health={"every": 3})  # scales that are always right
    assert not [r for r in of(FindingRecord, own) if r.what.startswith("saturation")]


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_what_was_counted_between_two_readings_survives_a_checkpoint(growing, tmp_path, cut):
    settings = {"steps": 9, "health": {"every": 3}, "eval": {"every": 2}}
    saving = {**settings, "checkpoint": {"every": cut, "keep": 9}}
    straight = growing("fp8-delayed", **settings)
    growing("fp8-delayed", folder=tmp_path, **saving)
    state = load_checkpoint(tmp_path / "checkpoints" / f"step-{cut:06d}")
    rest = growing("fp8-delayed", resume=state, **settings)
    expected = [record for record in straight if record.step > cut]
    assert len(of(HealthRecord, expected)) >= 2
    assert all(same_trajectory(a, b) for a, b in zip(expected, rest, strict=True))


INFINITE = {"module": "first", "role": "grad_output", "value": "inf"}


def scaled(**settings):
    return {"precision": {"policy": "fp16", "loss_scale": settings}}


def found_in(ready, **settings):
    made = ready("fp16", **settings)
    return of(FindingRecord, train_loop(made.prepared, made.task, made.recipe))


@pytest.mark.parametrize("verdicts", [False, True])
def test_an_overflow_at_the_smallest_scale_is_told_once(ready, verdicts):
    found = found_in(
        ready,
        steps=8,
        health={"every": 0, "diagnose": verdicts},
        fault_injection=({"step": 4, **INFINITE},),
        **scaled(init_scale=1.0),
    )
    announced, told = found
    assert announced.what == "fault injected"
    assert (told.step, told.what) == (4, "overflow at the smallest loss scale")
    assert told.why.endswith("the scale is 1, its minimum")
    assert "training stops after 50 in a row" in told.action
    assert (told.module, told.role) == ("first", "grad_output") or not verdicts
    # What was put in on purpose no format keeps out, as a replay knows.
    advice = "no format helps: try a lower optimizer.lr" if verdicts else "try precision.overrides"
    assert told.advice.startswith(advice)


def test_a_nan_at_the_smallest_scale_is_told_once_as_what_it_is(ready):
    faults = ({"step": 4, **INFINITE, "value": "nan"},)
    found = found_in(
        ready, steps=8, health={"every": 0}, fault_injection=faults, **scaled(init_scale=1.0)
    )
    assert [(each.step, each.what) for each in found] == [(4, "fault injected"), (4, "NaN")]
    assert found[1].why.endswith("the scale is 1, its minimum")


def test_a_scale_that_overflows_down_to_its_floor_is_told_once(ready):
    faults = tuple({"step": step, **INFINITE} for step in (3, 4))
    found = found_in(
        ready, steps=8, health={"every": 0}, fault_injection=faults, **scaled(init_scale=4.0)
    )
    (told,) = [each for each in found if each.role == "loss scale"]
    assert (told.step, told.what) == (5, "loss scale at its floor")
    assert not [each for each in found if "smallest loss scale" in each.what]


def test_an_overflow_at_the_smallest_scale_tells_of_the_floor_as_well(ready):
    faults = tuple({"step": step, **INFINITE} for step in (3, 4, 5))
    found = found_in(
        ready, steps=10, health={"every": 0}, fault_injection=faults, **scaled(init_scale=4.0)
    )
    told = [each for each in found if "scale" in each.what]
    assert [(each.step, each.what) for each in told] == [(5, "overflow at the smallest loss scale")]


@pytest.mark.parametrize(
    ("initial", "expected"), [(2.0**-8, ["loss scale too low"]), (2.0**12, [])]
)
def test_a_scale_too_low_for_the_gradients_of_a_run_is_found(ready, initial, expected):
    found = found_in(
        ready, steps=6, health={"every": 2}, **scaled(init_scale=initial, min_scale=2.0**-10)
    )
    assert [each.what for each in found] == expected
    assert all("precision.loss_scale.init_scale=" in each.advice for each in found)
