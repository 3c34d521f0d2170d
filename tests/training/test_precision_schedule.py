"""Runs with a policy a phase: when one begins, what is told, and that a resume changes nothing."""

import dataclasses
import math
from itertools import pairwise

import pytest

from narrowcast.config.phases import ConditionSection
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.runs import EvalRecord, PrecisionRecord, StepRecord, same_trajectory
from narrowcast.training.checkpoints.checkpoint import load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.phase_plans import phases_json, plan_phases
from narrowcast.training.precision_schedule import PrecisionSchedule, ScheduleProgress
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.train_loop import train_loop

STEPS = 12
COURSE = (
    {"policy": "fp32", "until": 4},
    {"policy": "fp8-delayed", "until": "75%"},
    {"policy": "bf16"},
)


@pytest.fixture
def scheduled(ready):
    """Make a run of these phases ready."""

    def make(*phases, steps=STEPS, precision=None, **settings):
        return ready(steps=steps, precision={"schedule": phases, **(precision or {})}, **settings)

    return make


@pytest.fixture
def run(scheduled):
    """Train through these phases; return the records and the model."""

    def go(*phases, folder=None, resume=None, **settings):
        made = scheduled(*phases, **settings)
        records = train_loop(made.prepared, made.task, made.recipe, folder=folder, resume=resume)
        return list(records), made.prepared

    return go


def changes(records):
    return [record for record in records if isinstance(record, PrecisionRecord)]


def losses(records):
    return [record.loss for record in records if isinstance(record, StepRecord)]


def test_each_phase_begins_after_the_last_step_of_the_one_before(run):
    records, prepared = run(*COURSE)
    assert changes(records) == [
        PrecisionRecord(
            step=5, module="*", before="fp32", after="fp8-delayed",
            reason="phase 2 of 3 begins: after step 4",
        ),
        PrecisionRecord(
            step=10, module="*", before="fp8-delayed", after="bf16",
            reason="phase 3 of 3 begins: after step 9 (75%)",
        ),
    ]  # fmt: skip
    assert str(prepared.plan.policy) == "compute=bf16"
    order = [record.step for record in records if not isinstance(record, EvalRecord)]
    assert all(a <= b for a, b in pairwise(order))


def test_until_its_end_a_phase_is_a_run_in_its_policy(run):
    records, _ = run(*COURSE)
    plain, _ = run({"policy": "fp32"})
    assert losses(records)[:4] == losses(plain)[:4]
    assert losses(records)[5] != losses(plain)[5]


def test_phases_of_one_policy_are_the_run_without_them(run):
    bf16 = {"precision": {"policy": "bf16"}}
    records, prepared = run({"until": 3}, {"policy": "default", "until": 0.5}, {}, **bf16)
    plain, other = run({}, **bf16)
    assert losses(records) == losses(plain)
    assert first_difference(prepared.state_dict(), other.state_dict(), where="") is None


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2])
@pytest.mark.parametrize(
    "phases",
    [
        COURSE,
        ({"policy": "aggressive", "until": 3}, {"policy": "fp16", "until": 8}, {"policy": "fp32"}),
        (
            {"policy": "fp16", "until": {"calm": 4}},
            {"policy": "fp8-tensor", "until": {"calm": 2}},
            {"policy": "bf16, params=bf16, master=stochastic"},
        ),
    ],
)
def test_a_run_resumed_at_any_step_is_the_uninterrupted_one(
    phases, gradient_accumulation_steps, tmp_path, run
):
    settings = {
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "ema": {"decay": 0.9},
        "checkpoint": {"every": 1, "keep": STEPS},
        "eval": {"every": 5},
    }
    straight, prepared = run(*phases, folder=tmp_path, **settings)
    assert len(changes(straight)) == len(phases) - 1
    # Odd steps here, even ones there: each is resumed from once.
    for step in range(gradient_accumulation_steps, STEPS, 2):
        state = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:06d}")
        resumed, other = run(*phases, resume=state, **settings)
        rest = [r for r in straight if r.step > step and not hasattr(r, "seconds_total")]
        assert len(resumed) == len(rest), f"resumed from step {step}"
        assert all(map(same_trajectory, resumed, rest)), f"resumed from step {step}"
        found = first_difference(other.state_dict(), prepared.state_dict(), where="")
        assert found is None, f"resumed from step {step}"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizers_go_on_through_phases(optimizer, run):
    settings = {"optimizer": {"name": optimizer, "lr": 0.01}}
    records, prepared = run(*COURSE, **settings)
    assert prepared.steps_applied == STEPS
    assert all(math.isfinite(loss) for loss in losses(records))


def test_a_condition_is_met_by_calm_steps_and_holds_one_step_later(run):
    records, _ = run({"policy": "fp16", "until": {"calm": 5}}, {"policy": "fp32"})
    steps = [record for record in records if isinstance(record, StepRecord)]
    skipped = sum(not record.applied for record in steps[:5])
    assert skipped  # at first the scale is too large for this model
    (change,) = changes(records)
    met = skipped + 5
    assert change.step == met + 2
    assert change.reason == f"phase 2 of 2 begins: 5 calm steps in a row, by step {met}"


def step_record(step, *, loss=1.0, applied=True):
    return StepRecord(
        step=step, loss=loss, loss_scale=1.0, applied=applied, skip_reason="", grad_norm=1.0,
        lr=0.1,
        lost_updates=None, items=1, seconds=0.1, peak_bytes=1,
    )  # fmt: skip


def test_a_skipped_step_makes_the_calm_begin_again():
    progress, until = ScheduleProgress(), ConditionSection(calm=3)
    for step, applied in enumerate([True, True, False, True, True, True], start=1):
        assert progress.met_at is None
        progress = progress.after(step_record(step, applied=applied), until)
    assert progress.met_at == 6
    assert not progress.is_over(6, until, steps=100)
    assert progress.is_over(7, until, steps=100)


def test_a_loss_is_below_when_the_mean_of_twenty_is():
    progress, until = ScheduleProgress(), ConditionSection(loss_below=1.0)
    for step in range(1, 20):
        progress = progress.after(step_record(step, loss=0.5), until)
    assert progress.met_at is None
    assert progress.after(step_record(20, loss=10.4), until).met_at == 20
    assert progress.after(step_record(20, loss=10.6), until).met_at is None
    assert progress.after(step_record(20, loss=math.nan), until).met_at is None


def test_a_phase_that_is_over_before_it_begins_is_left_out(run):
    phases = ({"until": {"calm": 6}}, {"policy": "bf16", "until": 5}, {"policy": "fp8-tensor"})
    records, _ = run(*phases)
    (change,) = changes(records)
    assert (change.step, change.after) == (8, "fp8-tensor")
    assert change.reason == "phase 3 of 3 begins: 6 calm steps in a row, by step 6"


def test_overrides_of_the_recipe_hold_in_every_phase_and_a_phase_adds_its_own(scheduled):
    made = scheduled(
        {"until": 4}, {"policy": "fp8-tensor", "overrides": {"fall": "fp32"}},
        precision={"policy": "bf16", "overrides": {"rise": "fp32"}},
    )  # fmt: skip
    hardware = made.prepared.plan.hardware
    first, second = plan_phases(made.recipe, made.task.model, hardware=hardware, gemm_rows=8)
    assert [m.name for m in first.modules if m.policy.forward == "fp32"] == ["rise"]
    assert second.policy.exceptions == (("rise", "fp32"), ("fall", "fp32"))


def test_a_loss_scale_that_begins_with_a_phase_is_that_of_the_recipe(run):
    precision = {"loss_scale": {"init_scale": 256.0}}
    records, _ = run({"policy": "bf16", "until": 4}, {"policy": "fp16"}, precision=precision)
    scales = [record.loss_scale for record in records if isinstance(record, StepRecord)]
    assert scales == [1.0] * 4 + [256.0] * 8


def test_all_policies_that_cannot_be_are_told_before_the_run(scheduled):
    with pytest.raises(ConfigError) as refused:
        scheduled({"policy": "fp23", "until": 3}, {"policy": "bf16; nix: fp32"})
    first, second = str(refused.value).splitlines()
    assert first.startswith("phase 1 of precision.schedule: precision policy: there is no preset")
    assert second.startswith("phase 2 of precision.schedule: precision exception `nix: fp32`")


def test_what_a_later_phase_could_not_begin_with_is_refused_before_the_run(scheduled):
    made = scheduled(
        {"policy": "fp16", "until": 4}, {"policy": "bf16"},
        precision={"loss_scale": {"scale_groups": ("first", "second")}},
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"phase 2 of precision.schedule: scale_groups needs a single"
    ):
        train_loop(made.prepared, made.task, made.recipe)


def test_moments_that_the_optimizer_cannot_keep_are_refused_before_the_run(scheduled):
    made = scheduled(
        {"until": 4}, {"policy": "bf16, moments=int8"}, optimizer={"name": "sgd", "lr": 0.01}
    )
    with pytest.raises(UnsupportedError, match=r"phase 2 of precision.schedule: moments=int8"):
        train_loop(made.prepared, made.task, made.recipe)


def test_a_model_prepared_in_another_policy_is_brought_into_the_first_phase(scheduled, run, ready):
    made, other = scheduled(*COURSE), ready("aggressive")
    other.prepared.release()
    prepared = prepare_recipe(made.recipe, other.task, plan=other.prepared.plan)
    records = list(train_loop(prepared, other.task, made.recipe))
    assert losses(records) == losses(run(*COURSE)[0])


def test_a_checkpoint_of_a_longer_schedule_is_refused(scheduled):
    made = scheduled({"until": 4}, {"policy": "bf16"})
    schedule = PrecisionSchedule(made.prepared, made.recipe, task=made.task)
    state = {**dataclasses.asdict(ScheduleProgress(phase=2, since=9)), "losses": []}
    with pytest.raises(CheckpointError, match=r"phase 3 of a precision\.schedule"):
        schedule.restore(state)


def test_the_plan_of_a_run_tells_what_each_phase_gives_each_module(scheduled):
    made = scheduled(
        {"policy": "fp32", "until": 3}, {"policy": "bf16", "overrides": {"fall": "fp32"}}
    )
    plans = plan_phases(
        made.recipe,
        made.task.model,
        hardware=made.prepared.plan.hardware,
        gemm_rows=made.task.gemm_rows,
    )
    told = phases_json(made.recipe, plans)
    assert told["modules"] == made.prepared.plan.to_json()["modules"]
    first, second = told["phases"]
    assert (first["policy"], second["policy"]) == ("fp32", "bf16; fall: fp32")
    assert (first["formats"]["first"], second["formats"]["first"]) == ("fp32", "bf16")
    assert second["formats"]["fall"] == "fp32"
