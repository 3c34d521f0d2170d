"""A run whose frozen base is kept in e4m3: readings, faults, adaptive precision, checkpoints."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import narrowcast as nc
from narrowcast.config.sections import FaultSection
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.runs import FindingRecord, HealthRecord, StepRecord, same_trajectory
from narrowcast.training.checkpoints.checkpoint import load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.train_loop import train_loop

SETTINGS = {
    "steps": 12,
    "checkpoint": {"every": 6},
    "ema": {"decay": 0.9},
    "health": {"every": 2},
    "fault_injection": ({"step": 4, "module": "base", "role": "input", "value": "nan"},),
}


class Adapted(nn.Module):
    """A frozen layer with a trained one beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rise = nn.Linear(1, 16)
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.beside = nn.Linear(16, 16)
        self.fall = nn.Linear(16, 1)
        nc.quantize_frozen(self)

    def forward(self, x):
        x = torch.tanh(self.rise(x))
        return self.fall(torch.tanh(self.base(x) + self.beside(x)))


def made(ready, policy, **settings):
    given = {**SETTINGS, **settings}
    given["fault_injection"] = tuple(FaultSection(**fault) for fault in given["fault_injection"])
    task = replace(ready().task, model=Adapted())
    precision = {"policy": policy, "adapt": {"enabled": True, "cooldown": 2, "calm_steps": 4}}
    return ready(task=task, precision=precision, **given)


def run(made, folder, resume=None):
    return list(train_loop(made.prepared, made.task, made.recipe, folder=folder, resume=resume))


@pytest.mark.parametrize("policy", ["fp16", "fp8-row"])
def test_it_is_watched_explained_and_resumed_bit_for_bit(policy, ready, tmp_path):
    whole = made(ready, policy)
    assert isinstance(whole.prepared.model.base, QuantizedFrozenLayer)
    records = run(whole, tmp_path / "whole")
    steps = [r for r in records if isinstance(r, StepRecord)]
    assert [r.step for r in steps if not r.applied] == [4]
    found = [r for r in records if isinstance(r, FindingRecord) and r.step == 4]
    assert ("base", "input", "NaN") in [(r.module, r.role, r.what) for r in found]
    readings = [r for r in records if isinstance(r, HealthRecord)]
    assert all("base" in r.module for r in readings)
    state = load_checkpoint(tmp_path / "whole" / "checkpoints" / "step-000006")
    resumed = made(ready, policy)
    rest = run(resumed, tmp_path / "resumed", resume=state)
    later = [r for r in records if r.step > 6]
    assert all(same_trajectory(a, b) for a, b in zip(later, rest, strict=True))
    assert first_difference(*[each.prepared.state_dict() for each in (whole, resumed)]) is None
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert saved["base.weight_e4m3"].dtype == torch.float8_e4m3fn
    plain = Adapted()
    plain.load_state_dict(saved)
    assert torch.equal(plain.base.weight, whole.prepared.release().base.weight)
