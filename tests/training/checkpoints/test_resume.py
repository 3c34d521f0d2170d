import math
from types import SimpleNamespace

import pytest
import torch

from narrowcast.config.sections import CheckpointSection
from narrowcast.errors import CheckpointError
from narrowcast.hardware import detect_hardware
from narrowcast.hardware.randomness import capture_randomness
from narrowcast.precision.plan.plan import make_plan
from narrowcast.runs import CheckpointRecord, RunFolder, StepRecord, same_trajectory
from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint
from narrowcast.training.checkpoints.resume import (
    latest_state,
    require_same_model,
    rewind_to,
    shapes,
)
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads import build_task, load_recipe

N, K = 9, 4

POLICIES = ["fp32", "bf16", "fp16", "bf16-pure", "fp8-delayed", "aggressive"]
SETTINGS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "averaged": {"ema": {"decay": 0.9}},
    "unclipped": {"clip_norm": None},
    "evaluated": {"eval": {"every": 2}},
    "momentum": {"optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}},
    "adafactor": {"optimizer": {"name": "adafactor", "lr": 0.01}},
    "linear": {"lr_schedule": {"name": "linear", "warmup": 6}},
    "watched": {"health": {"every": 1}, "batch_size": 24},
}


def course(made, **settings):
    return list(train_loop(made.prepared, made.task, made.recipe, **settings))


def everything(made, device="cpu"):
    """All that could differ after a run: precision state, weights in full, random generators."""
    return {
        "prepared": made.prepared.state_dict(),
        "weights": made.prepared.fp32_state_dict(),
        "random": capture_randomness(torch.device(device)),
    }


def difference_after_resume(ready, folder, policy, settings, device="cpu"):
    """Where k steps, save, load afresh, n - k steps first differ from n steps; None: nowhere."""
    settings = {"checkpoint": {"every": K, "keep": 99}, "steps": N, "device": device, **settings}
    settings["deterministic"] = device == "cuda"
    straight = ready(policy, **settings)
    expected = course(straight, folder=folder / "straight")
    final = everything(straight, device)
    torch.manual_seed(12345)  # a fresh process would not have the generators where they are
    fresh = ready(policy, **settings)
    state = load_checkpoint(folder / f"straight/checkpoints/step-{K:06d}")
    rest = course(fresh, resume=state, folder=folder / "resumed")
    at = next(i for i, r in enumerate(expected) if isinstance(r, CheckpointRecord)) + 1
    assert len(expected) - at > N - K  # there is something to resume
    if len(rest) != len(expected) - at or not all(map(same_trajectory, expected[at:], rest)):
        return f"records: {expected[at:]} and {rest}"
    return first_difference(everything(fresh, device), final)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_is_the_uninterrupted_one_in_every_policy(ready, tmp_path, policy):
    settings = {"gradient_accumulation_steps": 2, "ema": {"decay": 0.9}, "clip_norm": 0.5}
    assert difference_after_resume(ready, tmp_path, policy, settings) is None


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_a_resumed_run_is_the_uninterrupted_one_under_every_setting(ready, tmp_path, settings):
    assert difference_after_resume(ready, tmp_path, "fp16", settings) is None


def test_a_run_resumed_in_the_midst_of_overflows_is_the_uninterrupted_one(ready, tmp_path):
    scale = {"init_scale": 2.0**34, "max_scale": 2.0**34, "hysteresis": 2}
    settings = {"steps": 60, "precision": {"policy": "fp16", "loss_scale": scale}}
    assert difference_after_resume(ready, tmp_path, "fp16", settings) is None


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_is_the_uninterrupted_one_on_the_gpu(ready, tmp_path, policy):
    assert (
        difference_after_resume(ready, tmp_path, policy, {"ema": {"decay": 0.9}}, device="cuda")
        is None
    )


def language_model(policy="bf16", *, device="cpu", **settings):
    """Make a small GPT on the text of Python's help ready; `settings` are those of its recipe."""
    words = ["model.layers=2", "model.width=32", "model.heads=2", "data.length=32", "batch_size=4"]
    if device == "cuda":  # where attention's usual kernels differ from run to run
        words = ["model.layers=4", "model.width=512", "data.length=1024", "batch_size=8"]
    words += [f"precision.policy={policy}", "lr_schedule.warmup=2"]
    words += [f"deterministic={str(settings['deterministic']).lower()}"]
    recipe = load_recipe("quickstart", [*words, f"steps={settings['steps']}"]).recipe
    recipe = recipe.model_copy(update={"checkpoint": CheckpointSection(**settings["checkpoint"])})
    task = build_task(recipe, device=torch.device(device))
    planned = make_plan(task.model, policy, hardware=detect_hardware(device))
    return SimpleNamespace(
        task=task, recipe=recipe, prepared=prepare_recipe(recipe, task, plan=planned)
    )


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_resumed_language_model_is_the_uninterrupted_one(tmp_path, policy):
    assert difference_after_resume(language_model, tmp_path, policy, {}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8-tensor"])
def test_a_resumed_language_model_is_the_uninterrupted_one_on_the_gpu(tmp_path, policy):
    assert difference_after_resume(language_model, tmp_path, policy, {}, device="cuda") is None


def begin(path, made):
    """A run folder with the records of a whole run in it."""
    run = RunFolder.create(path, recipe_text="", resolved={}, environment={})
    for record in train_loop(made.prepared, made.task, made.recipe, folder=path):
        run.write(record)
    return run


def test_a_killed_run_is_taken_up_at_its_last_checkpoint(ready, tmp_path):
    settings = {"steps": 10, "checkpoint": {"every": 4}}
    with begin(tmp_path / "straight", ready(**settings)) as straight:
        expected = straight.records()
    killed = RunFolder.create(tmp_path / "killed", recipe_text="", resolved={}, environment={})
    made = ready(**settings)
    with killed:
        for record in train_loop(made.prepared, made.task, made.recipe, folder=killed.path):
            killed.write(record)
            if record.step == 6:
                break
    with RunFolder.open(tmp_path / "killed") as run:
        state = latest_state(run)
        assert state is not None
        fresh = ready(**settings)
        records = train_loop(
            fresh.prepared, fresh.task, fresh.recipe, folder=run.path, resume=state
        )
        rewind_to(run, state)
        assert run.records()[-1].step == 4
        for record in records:
            run.write(record)
        assert len(run.records()) == len(expected)
        assert all(map(same_trajectory, run.records(), expected))


def test_a_checkpoint_that_was_saved_but_not_recorded_is_recorded_on_return(ready, tmp_path):
    with begin(tmp_path / "run", ready(steps=4, checkpoint={"every": 2})) as run:
        expected = run.records()
        assert isinstance(expected[-1], CheckpointRecord)
        records = tmp_path / "run/records.jsonl"
        lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:-1]))
    with RunFolder.open(tmp_path / "run") as run:
        rewind_to(run, latest_state(run))
        assert len(run.records()) == len(expected)
        assert all(map(same_trajectory, run.records(), expected))
        last = run.records()[-1]
        assert isinstance(last, CheckpointRecord)
        assert last.bytes == expected[-1].bytes
        assert math.isnan(last.seconds_blocked)


def test_a_run_without_a_checkpoint_begins_again(ready, tmp_path):
    run = RunFolder.create(tmp_path / "run", recipe_text="", resolved={}, environment={})
    made = ready(steps=5)
    with run:
        for record in train_loop(made.prepared, made.task, made.recipe):
            if isinstance(record, StepRecord):
                run.write(record)
        assert latest_state(run) is None
        rewind_to(run, None)
        assert run.records() == []


def test_reading_the_latest_state_changes_no_file(ready, tmp_path):
    with begin(tmp_path / "run", ready(steps=4, checkpoint={"every": 2})) as run:
        run.close()
        before = {p: p.stat().st_mtime_ns for p in sorted((tmp_path / "run").rglob("*"))}
        assert latest_state(run) is not None
    assert {p: p.stat().st_mtime_ns for p in sorted((tmp_path / "run").rglob("*"))} == before


def test_a_damaged_latest_checkpoint_is_said_not_passed_over(ready, tmp_path):
    with begin(tmp_path / "run", ready(steps=4, checkpoint={"every": 2})) as run:
        newest = latest(run.checkpoints)
        assert newest is not None
        (newest / "tensors.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="step-000002, which is intact"):
            latest_state(run)


def test_models_of_the_same_shapes_are_the_same():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert require_same_model(shapes(model), model, step=1) is None  # it raises where they differ


def test_the_first_differences_between_models_are_named():
    saved = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(
        CheckpointError,
        match=r"1\.weight is 2×2 in the checkpoint and 2 here; 2\.weight is 2×2 in the checkpoint "
        r"and missing here; 2\.bias .* missing here and 3 more\. Nothing was loaded",
    ):
        require_same_model(shapes(saved), other, step=7)
