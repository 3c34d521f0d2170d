import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from narrowcast.runs import PrecisionRecord, Record, RunFolder, StepRecord, same_trajectory


def records_of(folder: Path) -> list[Record]:
    with RunFolder.open(folder) as run:
        return run.records()


def same(a: list[Record], b: list[Record]) -> bool:
    return len(a) == len(b) and all(same_trajectory(x, y) for x, y in zip(a, b, strict=True))


def weights_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor; the order of the file's own notes may differ."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def done(narrowcast, tiny, tmp_path) -> Path:
    """A run of four steps that has finished."""
    assert narrowcast("train", tiny, "checkpoint.every=2", "--out", tmp_path / "done").code == 0
    return tmp_path / "done"


def test_a_run_killed_at_any_step_and_resumed_is_the_run_it_would_have_been(
    start, narrowcast, tiny, tmp_path
):
    words = ["train", tiny, "steps=80", "checkpoint.every=10", "eval.every=20", "ema.decay=0.9"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with start(*words, "--out", killed) as process:
        while not _recorded(killed, 25):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert narrowcast(*words, "--out", straight).code == 0
    assert narrowcast("resume", killed).code == 0
    assert same(records_of(killed), records_of(straight))
    assert weights_of(killed) == weights_of(straight)
    assert len(json.loads((killed / "environment.json").read_text())["sessions"]) == 2


PHASES = "[{policy: fp32, until: 8}, {policy: fp8-delayed, until: 70%}, {policy: bf16}]"


def test_a_run_resumed_in_any_phase_is_the_uninterrupted_one(
    narrowcast, resumed_from, tiny, tmp_path
):
    words = ["steps=24", "checkpoint.every=4", "checkpoint.keep=9", f"precision.schedule={PHASES}"]
    assert narrowcast("train", tiny, *words, "--out", tmp_path / "run").code == 0
    changes = [r for r in records_of(tmp_path / "run") if isinstance(r, PrecisionRecord)]
    assert [(r.step, r.after) for r in changes] == [(9, "fp8-delayed"), (18, "bf16")]
    for step in (4, 12, 20):
        resumed_from(tmp_path / "run", step)


def test_phases_that_end_elsewhere_in_a_longer_run_are_told(narrowcast, tiny, tmp_path):
    schedule = "precision.schedule=[{policy: fp32, until: 50%}, {policy: bf16}]"
    assert narrowcast("train", tiny, schedule, "--out", tmp_path / "run").code == 0
    ended = narrowcast("resume", tmp_path / "run", "steps=8")
    assert ended.code == 0
    assert "phases that end at a share of the run now end at a share of 8 steps" in ended.out
    assert "started on" not in ended.out  # the same machine, the same plan


def test_a_finished_run_says_so_and_nothing_is_done(narrowcast, done):
    before = files(done)
    ended = narrowcast("resume", done)
    assert ended.code == 0
    assert "has finished its 4 steps" in ended.out
    assert f"narrowcast resume {done} steps=8" in ended.out
    assert files(done) == before


def test_a_finished_run_goes_on_where_steps_is_raised(narrowcast, done, tiny, tmp_path):
    assert narrowcast("resume", done, "steps=6").code == 0
    assert narrowcast("train", tiny, "steps=6", "--out", tmp_path / "six").code == 0
    assert weights_of(done) == weights_of(tmp_path / "six")
    resolved = json.loads((done / "resolved.json").read_text())
    assert resolved["steps"] == {"value": 6, "origin": "command line"}
    # The longer run is what is finished now.
    assert "has finished its 6 steps" in narrowcast("resume", done).out


def test_weights_of_a_shorter_run_are_not_taken_for_those_of_the_longer_one(narrowcast, done):
    weights = weights_of(done)
    (done / "model.safetensors").write_bytes(b"those of an earlier step")
    os.utime(done / "model.safetensors", (0, 0))
    assert narrowcast("resume", done).code == 0
    assert weights_of(done) == weights


def test_a_run_without_a_checkpoint_begins_again_in_its_folder(narrowcast, done):
    straight = records_of(done)
    weights = weights_of(done)
    shutil.rmtree(done / "checkpoints")
    (done / "model.safetensors").unlink()
    ended = narrowcast("resume", done)
    assert ended.code == 0
    assert "the beginning, because there is no checkpoint yet" in ended.out
    assert same(records_of(done), straight)
    assert weights_of(done) == weights


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer.lr=0.5", "other values for optimizer.lr (was 0.01)"),
        ("seed=1", "other values for seed (was 0)"),
        ("precision.policy=fp32", "other values for precision.policy (was fp16)"),
        ("data.length=8", "other values for data.length (was 16)"),
        ("stesp=9", "no such setting. Did you mean steps"),
        ("steps=1", "steps must be at least 4"),
    ],
)
def test_a_change_that_would_make_it_another_run_is_refused(narrowcast, done, word, message):
    before = files(done)
    ended = narrowcast("resume", done, word)
    assert ended.code == 2
    assert message in ended.err
    assert files(done) == before


def test_a_setting_given_as_it_is_is_no_change(narrowcast, done):
    assert narrowcast("resume", done, "optimizer.lr=1e-2", "seed=0").code == 0


def test_settings_that_decide_no_step_may_change(narrowcast, done):
    words = ["steps=8", "checkpoint.every=3", "checkpoint.keep=9", "eval.every=1", "device=auto"]
    words += ["data.prefetch=1", "memory.activation_checkpointing=blocks"]
    assert narrowcast("resume", done, *words).code == 0
    assert {path.name for path in (done / "checkpoints").iterdir()} == {
        f"step-{n:06d}" for n in (2, 4, 6, 8)
    }


def test_a_longer_run_says_that_a_falling_learning_rate_moves(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    assert narrowcast("train", tiny, "lr_schedule.name=cosine", "--out", out).code == 0
    ended = narrowcast("resume", out, "steps=8")
    assert "the cosine learning rate now ends at step 8 instead of 4" in ended.out


def test_a_run_that_began_on_another_machine_says_so(narrowcast, done):
    plan = json.loads((done / "plan.json").read_text())
    (done / "plan.json").write_text(json.dumps(plan | {"hardware": "another machine"}))
    ended = narrowcast("resume", done, "steps=5")
    assert ended.code == 0
    assert "the run started on another machine" in ended.out
    assert "not bit-exact" in ended.out


def test_what_auto_stood_for_may_be_said_when_a_run_goes_on(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    assert narrowcast("train", tiny, "precision.policy=auto", "--out", out).code == 0
    policy = json.loads((out / "plan.json").read_text())["policy"]
    assert narrowcast("resume", out, f"precision.policy={policy}", "steps=5").code == 0


def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(narrowcast, done):
    tensors = done / "checkpoints" / "step-000004" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    before = files(done)
    ended = narrowcast("resume", done, "steps=6")
    assert ended.code == 2
    assert "step-000002, which is intact" in ended.err
    assert files(done) == before


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([], True),
        (["lr_schedule.name=cosine"], False),
        (["lr_schedule.warmup_ratio=0.5"], False),
        (["precision.schedule=[{policy: fp32, until: 50%}, {}]"], False),
        (["strategy.name=hybrid"], False),
    ],
)
def test_more_steps_are_offered_only_where_they_continue_the_run_unchanged(
    words, offered, narrowcast, tiny, tmp_path
):
    ended = narrowcast("train", tiny, *words, "--out", tmp_path / "run")
    assert (ended.code, "steps=8" in ended.out) == (0, offered)
    assert ("steps=8" in narrowcast("resume", tmp_path / "run").out) is offered


def test_a_folder_without_a_run_is_bad_input(narrowcast, tmp_path):
    ended = narrowcast("resume", tmp_path)
    assert ended.code == 2
    assert "is not a run folder" in ended.err


def _recorded(folder: Path, step: int) -> bool:
    """Say whether a run that is being written has recorded `step`; it may be in mid-line."""
    if not (folder / "records.jsonl").exists():
        return False
    return any(r.step >= step for r in records_of(folder) if isinstance(r, StepRecord))
