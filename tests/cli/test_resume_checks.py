"""What a resume compares before it touches anything, and what it may be told to accept."""

import json
import shutil
import string
from pathlib import Path

import pytest
from safetensors.torch import load_file

from narrowcast.runs import FindingRecord, RunFolder

CUT = ["checkpoint.every=2", "checkpoint.keep=9", "steps=6"]
DECISIVE = [  # a setting, and what somebody writes into resolved.json instead
    ("seed", 7),
    ("batch_size", 3),
    ("gradient_accumulation_steps", 2),
    ("clip_norm", 0.5),
    ("clip_norm", None),
    ("optimizer.lr", 0.5),
    ("optimizer.name", "sgd"),
    ("optimizer.betas", [0.5, 0.5]),
    ("optimizer.weight_decay", 0.5),
    ("lr_schedule.warmup", 3),
    ("precision.loss_scale.growth_interval", 1),
    ("precision.loss_scale.init_scale", 2.0),
    ("model.rope_base", 77.0),
    ("ema.decay", 0.5),
    ("data.validation_share", 0.3),
    ("health.diagnose", False),
]


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def edit(folder: Path, key: str, value: object) -> None:
    resolved = json.loads((folder / "resolved.json").read_text())
    assert key in resolved, key
    resolved[key]["value"] = value
    (folder / "resolved.json").write_text(json.dumps(resolved))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(string.ascii_lowercase) * 40)
    return path


@pytest.fixture
def half(narrowcast, tiny, tmp_path, text) -> Path:
    """A run as it lies there after a kill: its newest checkpoint is of step 4 of 6."""
    out = tmp_path / "half"
    assert narrowcast("train", tiny, *CUT, f"data.text={text}", "--out", out).code == 0
    shutil.rmtree(out / "checkpoints" / "step-000006")
    for name in ("model.safetensors", "finished.json", "report.html"):
        (out / name).unlink()
    return out


def test_other_data_of_equal_length_is_refused_and_accepted_by_a_word(narrowcast, half, text):
    text.write_text(text.read_text().upper())
    before = files(half)
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert "The training data differs from that of the checkpoint of step 4" in ended.err
    assert "but with other values" in ended.err
    assert "add --accept data (in Python accept=['data']) to continue" in ended.err
    assert files(half) == before
    assert narrowcast("resume", half, "--accept", "data").code == 0
    with RunFolder.open(half) as run:
        found = [r for r in run.records() if isinstance(r, FindingRecord) and r.role == "data"]
        assert [record.what for record in found] == ["the run continues with other data"]
        assert run.read_json("environment.json")["sessions"][-1]["accepted"] == ["data"]
    assert "has finished its 6 steps" in narrowcast("resume", half).out


def test_the_same_data_somewhere_else_is_the_same_data(narrowcast, half, text, tmp_path):
    moved = tmp_path / "elsewhere.txt"
    text.rename(moved)
    assert "no such file" in narrowcast("resume", half).err
    assert narrowcast("resume", half, f"data.text={moved}").code == 0
    assert "has finished" in narrowcast("resume", half).out


def test_a_relative_path_is_meant_from_where_the_run_began(
    narrowcast, tiny, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [*CUT, f"data.text={text.name}", "--out", tmp_path / "relative"]
    assert narrowcast("train", tiny, *words).code == 0
    shutil.rmtree(tmp_path / "relative/checkpoints/step-000006")
    monkeypatch.chdir("/")
    ended = narrowcast("resume", tmp_path / "relative")
    assert ended.code == 2
    assert f"The run started in {tmp_path}" in ended.err
    assert narrowcast("resume", tmp_path / "relative", f"data.text={text}").code == 0


def test_more_data_is_refused_and_accepted_by_a_word(narrowcast, half, text):
    text.write_text(text.read_text() * 2)
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert "samples and now has" in ended.err
    assert narrowcast("resume", half, "--accept", "data").code == 0


def test_held_out_text_that_changed_is_other_data_too(narrowcast, half, text):
    content = text.read_text()
    text.write_text(content[:-1] + "!")  # the end of the last tenth is held out
    assert narrowcast("resume", half).code == 2


@pytest.mark.parametrize(("key", "value"), DECISIVE)
def test_settings_that_are_not_those_of_the_checkpoint_are_refused_by_name(
    narrowcast, half, key, value
):
    edit(half, key, value)
    before = files(half)
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert f"{key} is " in ended.err
    assert "--accept settings" in ended.err
    assert files(half) == before


@pytest.mark.parametrize("damage", ["edit", "empty", "list", "cut", "missing"])
def test_the_settings_of_the_checkpoint_are_accepted_by_a_word(narrowcast, half, tiny, damage):
    resolved = half / "resolved.json"
    before = {k: e["value"] for k, e in json.loads(resolved.read_text()).items()}
    if damage == "edit":
        edit(half, "optimizer.lr", 0.5)
        edit(half, "seed", 3)
    elif damage == "missing":
        resolved.unlink()
    else:
        content = resolved.read_text()
        resolved.write_text({"empty": "", "list": "[]", "cut": content[:99]}[damage])
        assert "add --accept settings" in narrowcast("resume", half).err
    ended = narrowcast("resume", half, "--accept", "settings")
    assert ended.code == 0
    assert "the settings are those of the checkpoint. resolved.json had others" in ended.out
    after = json.loads(resolved.read_text())
    assert {k: e["value"] for k, e in after.items()} == before
    assert narrowcast("resume", half).code == 0


def test_without_a_checkpoint_there_is_nothing_to_take_settings_from(narrowcast, half):
    shutil.rmtree(half / "checkpoints")
    ended = narrowcast("resume", half, "--accept", "settings")
    assert ended.code == 0
    assert "the settings are those of the checkpoint" not in ended.out


def test_a_checkpoint_of_another_run_is_refused(narrowcast, half, tiny, text, tmp_path):
    other = tmp_path / "other"
    words = [*CUT, f"data.text={text}", "seed=1", "--out", other]
    assert narrowcast("train", tiny, *words).code == 0
    shutil.rmtree(half / "checkpoints")
    shutil.copytree(other / "checkpoints", half / "checkpoints")
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert "seed is 1 in the checkpoint and 0 here" in ended.err


def test_a_name_and_what_decides_no_step_may_be_written_differently(narrowcast, half):
    edit(half, "name", "another")
    edit(half, "checkpoint.every", 3)
    assert narrowcast("resume", half).code == 0


def test_a_run_that_lost_a_file_says_how_to_go_on_without_it(narrowcast, half):
    (half / "records.jsonl").unlink()
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert "has lost its records.jsonl" in ended.err
    assert narrowcast("resume", half, "--accept", "records").code == 0
    assert "has finished" in narrowcast("resume", half).out


def test_a_part_of_a_run_is_not_taken_for_one(narrowcast, half):
    ended = narrowcast("resume", half / "checkpoints" / "step-000004")
    assert ended.code == 2
    assert f"is part of the run in {half}. Name that folder" in ended.err


def test_records_that_lack_steps_are_refused_and_accepted_by_a_word(narrowcast, half):
    lines = (half / "records.jsonl").read_text().splitlines(keepends=True)
    third = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 3)
    (half / "records.jsonl").write_text("".join(lines[:third]))
    before = files(half)
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert "lacks 2 of the 4 steps before its checkpoint, the first is step 3" in (ended.err)
    assert files(half) == before
    assert narrowcast("resume", half, "--accept", "records").code == 0


@pytest.mark.parametrize("damage", ["edit", "swap"])
def test_records_that_say_something_else_are_refused(
    narrowcast, half, tiny, text, tmp_path, damage
):
    """Each line is right for itself; only the run knows what it has written."""
    records = half / "records.jsonl"
    if damage == "edit":
        lines = records.read_text().splitlines(keepends=True)
        lines[0] = lines[0].replace('"loss": ', '"loss": 1', 1)
        records.write_text("".join(lines))
    else:
        words = [*CUT, f"data.text={text}", "seed=1", "--out", tmp_path / "other"]
        assert narrowcast("train", tiny, *words).code == 0
        shutil.copy(tmp_path / "other/records.jsonl", records)
    before = files(half)
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert (
        "was changed after the run wrote it: it has other values up to the checkpoint" in ended.err
    )
    assert files(half) == before
    assert narrowcast("resume", half, "--accept", "records").code == 0
    assert "has finished" in narrowcast("resume", half).out


@pytest.mark.parametrize("name", ["report.html", "model.safetensors", "plan.json"])
def test_a_folder_in_the_place_of_a_file_is_said_before_anything_is_done(narrowcast, half, name):
    (half / name).unlink(missing_ok=True)
    (half / name).mkdir()
    before = files(half)
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert f"{name} must be a file, got a folder" in ended.err
    assert files(half) == before


def test_a_damaged_environment_or_recipe_does_not_block_a_resume(narrowcast, half):
    (half / "environment.json").write_text("[")
    (half / "recipe.yaml").write_bytes(b"\xff\xfe junk")
    (half / "plan.json").write_text("[]")
    ended = narrowcast("resume", half)
    assert ended.code == 0
    assert "environment.json was damaged" in ended.out
    assert "recipe.yaml cannot be read" in ended.out
    assert "plan.json was damaged" in ended.out
    assert (half / "environment.json.damaged").read_text() == "["
    assert len(json.loads((half / "environment.json").read_text())["sessions"]) == 1


def test_a_policy_that_auto_did_not_stand_for_is_refused_first(narrowcast, tiny, tmp_path):
    out = tmp_path / "auto"
    words = ["precision.policy=auto", "checkpoint.every=2", "--out", out]
    assert narrowcast("train", tiny, *words).code == 0
    policy = json.loads((out / "plan.json").read_text())["policy"]
    shutil.rmtree(out / "checkpoints" / "step-000004")
    before = files(out)
    other = "fp8-row" if "bf16" in policy or "fp32" in policy else "bf16"
    assert narrowcast("resume", out, f"precision.policy={other}").code == 2
    assert files(out) == before
    assert narrowcast("resume", out).code == 0


def test_a_refused_resume_changes_nothing(narrowcast, half):
    """Records after the checkpoint, which a resume drops, are there as long as it may fail."""
    assert narrowcast("resume", half, "data.workers=0", "steps=3").code == 2
    task = json.loads((half / "task.json").read_text())
    (half / "task.json").write_text(json.dumps(task | {"unit": "base"}))
    before = files(half)
    ended = narrowcast("resume", half)
    assert ended.code == 2
    assert "is a run of another task" in ended.err
    assert files(half) == before


@pytest.fixture
def done(narrowcast, tmp_path) -> Path:
    out = tmp_path / "done"
    words = ["steps=6", "checkpoint.every=3", "batch_size=8", "health.every=0", "--out", out]
    assert narrowcast("train", "tutorial", *words).code == 0
    return out


@pytest.mark.parametrize("name", ["report.html", "model.safetensors", "misread.json"])
@pytest.mark.parametrize("damage", ["missing", "junk", "cut"])
def test_what_a_finished_run_lacks_is_made_again(narrowcast, done, name, damage):
    whole = (done / name).read_bytes()
    if damage == "missing":
        (done / name).unlink()
    else:
        (done / name).write_bytes(b"junk" if damage == "junk" else whole[:-1])
    assert narrowcast("resume", done).code == 0
    if name == "model.safetensors":
        assert load_file(done / name)
    if name != "report.html":
        assert (done / name).read_bytes() == whole
    assert (done / "report.html").exists()
    assert "has finished its 6 steps" in narrowcast("resume", done).out


def test_a_kill_between_export_and_report_leaves_a_run_that_is_not_finished(narrowcast, done):
    (done / "report.html").write_text("of an earlier step")
    (done / ".report-due").touch()
    assert "has finished" not in narrowcast("resume", done).out
    assert (done / "report.html").stat().st_size > 10_000
    assert "has finished" in narrowcast("resume", done).out


def test_a_cut_last_checkpoint_of_a_finished_run_is_said(narrowcast, done):
    tensors = done / "checkpoints" / "step-000006" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    ended = narrowcast("resume", done)
    assert ended.code == 2
    assert "step-000003, which is intact" in ended.err
    shutil.rmtree(tensors.parent)
    assert narrowcast("resume", done).code == 0
    assert "has finished" in narrowcast("resume", done).out
