"""A run whose whole policy goes to wider formats after overflows in a row, and back."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from narrowcast.config.common_sections import FaultSection
from narrowcast.errors import DivergedError
from narrowcast.runs import PrecisionRecord, StepRecord, same_trajectory
from narrowcast.training.checkpoints.checkpoint import load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.train_loop import train_loop

STEPS = 40
SCALE = {"init_scale": 1024.0, "max_skipped_steps": 60}
ADAPT = {"adapt": {"overflows": 5, "calm_steps": 8}, "loss_scale": SCALE}


class Steep(nn.Module):
    """Gradients beyond fp16 in some passes, whatever the scale; in fp32 it is a plain network.

    Passes of skipped steps are not counted: what they write to a buffer is taken back.
    """

    def __init__(self, *, first, last):
        super().__init__()
        self.rise, self.fall = nn.Linear(1, 16), nn.Linear(16, 1)
        self.first, self.last = first, last
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        steep = (self.passes >= self.first) & (self.passes <= self.last)
        x = torch.tanh(self.rise(x))
        # The gradient of what is inside is larger by as much as the value is made smaller.
        return self.fall(_Steeper.apply(x, torch.where(steep, 2.0**40, 1.0)))


class _Steeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Cancelling(nn.Module):
    """Divides by the difference of two numbers: zero in bf16 and in fp16, and in fp32 not."""

    def __init__(self, *, first, last):
        super().__init__()
        self.net, self.near = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
        self.near.weight.data.fill_(1 + 2.0**-12)
        self.first, self.last = first, last
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        bad = (self.passes >= self.first) & (self.passes <= self.last)
        gap = self.near(torch.ones_like(x)).float() - torch.where(bad, 1.0, 0.5)
        return self.net(x) + gap.reciprocal() * 2.0**-12


@pytest.fixture
def run(ready):
    """Train a model whose gradients overflow in the passes it is told; return records and it."""

    def go(
        policy="fp16",
        *,
        first=4,
        last=9,
        kind=Steep,
        folder=None,
        resume=None,
        device="cpu",
        **settings,
    ):
        plain = ready(device=device).task
        torch.manual_seed(0)
        task = replace(plain, model=kind(first=first, last=last).to(device))
        usual = {"health": {"every": 0, "diagnose": False}, "optimizer": {"lr": 1e-3}}
        precision = {"policy": policy, **settings.pop("precision", ADAPT)}
        made = ready(
            task=task, steps=STEPS, device=device, precision=precision, **{**usual, **settings}
        )
        records = []
        with contextlib.suppress(DivergedError):
            for record in train_loop(
                made.prepared, task, made.recipe, folder=folder, resume=resume
            ):
                records.append(record)
        return records, made.prepared

    return go


def changes(records):
    found = [record for record in records if isinstance(record, PrecisionRecord)]
    return [(r.step, r.module, r.before, r.after, r.reason) for r in found]


def skipped(records):
    return [r.step for r in records if isinstance(r, StepRecord) and not r.applied]


def test_gradients_beyond_fp16_lead_to_bf16_and_back(run):
    records, prepared = run()
    assert changes(records) == [
        (10, "*", "fp16", "bf16", "5 overflows in a row, by step 8"),
        (19, "*", "bf16", "fp16", "calm for 8 steps, by step 17"),
    ]
    assert skipped(records) == [4, 5, 6, 7, 8, 9]
    assert str(prepared.plan.policy) == "compute=fp16"


def test_what_bf16_cannot_tell_apart_leads_to_fp32_and_back_one_at_a_time(run):
    frozen = {"optimizer": {"name": "sgd", "lr": 1e-9}}  # the two numbers stay as near as they are
    records, _ = run(kind=Cancelling, last=10, **frozen)
    assert [(step, before, after) for step, _, before, after, _ in changes(records)] == [
        (10, "fp16", "bf16"),
        (16, "bf16", "fp32"),
        (25, "fp32", "bf16"),
        (34, "bf16", "fp16"),
    ]
    assert skipped(records) == [*range(4, 16)]


def test_without_it_the_run_skips_what_it_cannot_hold(run):
    records, _ = run(precision={"loss_scale": SCALE})
    assert changes(records) == []
    assert skipped(records) == [*range(4, STEPS + 1)]


def test_a_good_step_between_overflows_keeps_the_policy(run):
    class Blinking(Steep):
        """Overflows in every step but one in four."""

        attempts = 0

        def forward(self, x):
            self.attempts += self.training and torch.is_grad_enabled()
            self.first, self.last = (0, 99) if self.attempts % 4 else (99, 99)
            return super().forward(x)

    records, _ = run(kind=Blinking)
    assert len(skipped(records)) == STEPS * 3 // 4
    assert changes(records) == []


def test_the_scale_goes_on_where_it_was_when_fp16_returns(run):
    records, _ = run()
    scale = {r.step: r.loss_scale for r in records if isinstance(r, StepRecord)}
    assert scale[4] == 2.0**10
    assert scale[10] == scale[19] == 2.0**4  # six overflows below


def test_a_run_resumed_anywhere_is_the_run_bit_for_bit(run, tmp_path):
    straight, prepared = run(folder=tmp_path, checkpoint={"every": 3, "keep": 100})
    # Counting overflows, due, in bf16, due to return, and back.
    for stop in (6, 9, 12, 18, 24):
        state = load_checkpoint(tmp_path / "checkpoints" / f"step-{stop:06d}")
        rest, again = run(resume=state)
        kinds = (StepRecord, PrecisionRecord)
        after = [r for r in straight if isinstance(r, kinds) and r.step > stop]
        found = [r for r in rest if isinstance(r, kinds)]
        assert all(same_trajectory(a, b) for a, b in zip(after, found, strict=True)), stop
        assert first_difference(prepared.state_dict(), again.state_dict(), where="") is None


def test_a_phase_begins_with_its_own_policy_and_without_a_scale_that_was_kept(run, tmp_path):
    schedule = ({"policy": "fp16", "until": 14}, {"policy": "bf16"})
    precision = {**ADAPT, "schedule": schedule}
    records, prepared = run(precision=precision, folder=tmp_path, checkpoint={"every": 20})
    assert [(step, after) for step, _, _, after, _ in changes(records)] == [
        (10, "bf16"),
        (15, "bf16"),
    ]
    assert prepared.engine.scales.value is None
    state = load_checkpoint(tmp_path / "checkpoints" / "step-000020")
    _, again = run(precision=precision, resume=state)
    assert first_difference(prepared.state_dict(), again.state_dict(), where="") is None


def test_a_rehearsed_fault_widens_nothing(run):
    faults = tuple(
        FaultSection(step=step, module="fall", role="grad_output", value="inf")
        for step in range(3, 12)
    )
    records, _ = run(first=99, last=99, fault_injection=faults)
    assert skipped(records) == [*range(3, 12)]
    assert changes(records) == []


def test_modules_and_the_whole_policy_adapt_side_by_side(run, tmp_path):
    adapt = {"overflows": 5, "calm_steps": 8, "enabled": True, "cooldown": 1}
    told = {"precision": {**ADAPT, "adapt": adapt}, "health": {"every": 1}}
    records, prepared = run(folder=tmp_path, checkpoint={"every": 3, "keep": 100}, **told)
    assert (10, "*", "fp16", "bf16") in [change[:4] for change in changes(records)]
    for stop in (9, 15):
        state = load_checkpoint(tmp_path / "checkpoints" / f"step-{stop:06d}")
        _, again = run(resume=state, **told)
        assert first_difference(prepared.state_dict(), again.state_dict(), where="") is None


def test_scales_of_parts_go_on_as_well(run):
    precision = {**ADAPT, "loss_scale": {**SCALE, "scale_groups": ("rise",)}}
    records, prepared = run(precision=precision)
    assert [after for _, _, _, after, _ in changes(records)] == ["bf16", "fp16"]
    assert str(prepared.plan.policy) == "compute=fp16"


def test_a_gpu_decides_as_a_cpu_and_resumes_bit_for_bit(run, tmp_path, cuda):
    expected, _ = run()
    told = {"device": "cuda", "deterministic": True, "checkpoint": {"every": 3, "keep": 100}}
    straight, prepared = run(folder=tmp_path, **told)
    assert changes(straight) == changes(expected)
    for stop in (6, 12):
        state = load_checkpoint(tmp_path / "checkpoints" / f"step-{stop:06d}")
        rest, again = run(resume=state, **told)
        assert changes(rest) == [change for change in changes(straight) if change[0] > stop]
        assert first_difference(prepared.state_dict(), again.state_dict(), where="") is None


def test_a_gpu_that_is_not_waited_for_decides_the_same(run, cuda):
    expected, _ = run()
    records, _ = run(device="cuda")
    assert changes(records) == changes(expected)
