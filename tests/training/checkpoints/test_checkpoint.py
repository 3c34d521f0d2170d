import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file

from narrowcast.errors import CheckpointError
from narrowcast.training.checkpoints.checkpoint import (
    checkpoint_step,
    checkpoints,
    latest,
    load_checkpoint,
    save_checkpoint,
)


def state(value=0.0, size=100):
    return {"weight": torch.full((size,), value), "count": 3, "best": float("inf"), 7: (1, None)}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save_in_child(folder, body):
    """Run `body` in another process, with `state` and `folder` at hand."""
    program = f"""
    import os, resource, signal, sys, time
    from pathlib import Path
    import torch
    from narrowcast.errors import CheckpointError
    from narrowcast.training.checkpoints.checkpoint import save_checkpoint
    folder = Path({str(folder)!r})
    """
    program = textwrap.dedent(program) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_what_was_saved_is_loaded(tmp_path):
    record = save_checkpoint(tmp_path, 12, state=state(1.5))
    loaded = load_checkpoint(tmp_path / "step-000012")
    assert torch.equal(loaded["weight"], torch.full((100,), 1.5))
    assert {k: v for k, v in loaded.items() if k != "weight"} == {
        "count": 3,
        "best": float("inf"),
        7: (1, None),
    }
    files = (tmp_path / "step-000012").iterdir()
    assert record.bytes == sum(file.stat().st_size for file in files)
    assert 0 < record.seconds_blocked <= record.seconds_total


def test_a_checkpoint_is_readable_without_this_library(tmp_path):
    save_checkpoint(tmp_path, 1, state=state(2.0))
    assert load_file(tmp_path / "step-000001/tensors.safetensors")["weight"][0] == 2.0
    described = json.loads((tmp_path / "step-000001/state.json").read_text())
    assert described["step"] == 1


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        save_checkpoint(tmp_path, step, state=state(), keep=3)
    assert names(tmp_path) == ["step-000010", "step-000015", "step-000020"]


def test_latest_is_by_number_not_by_spelling(tmp_path):
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, step, state=state())
    newest = latest(tmp_path)
    assert newest is not None
    assert checkpoint_step(newest) == 1_000_000


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 1, state=state(1.0))
    save_checkpoint(tmp_path, 1, state=state(2.0))
    assert names(tmp_path) == ["step-000001"]
    assert load_checkpoint(tmp_path / "step-000001")["weight"][0] == 2.0


def test_checkpoints_of_a_course_that_was_left_go_with_the_next_save(tmp_path):
    """After a return to step 10 the checkpoint of step 50 belongs to no run."""
    for step in (10, 50):
        save_checkpoint(tmp_path, step, state=state())
    save_checkpoint(tmp_path, 11, state=state())
    assert names(tmp_path) == ["step-000010", "step-000011"]


def test_leftovers_of_a_killed_save_are_no_checkpoints_and_go_with_the_next_save(tmp_path):
    (tmp_path / "step-000009.tmp-123").mkdir()
    (tmp_path / "step-000009.tmp-123/tensors.safetensors").touch()
    assert checkpoints(tmp_path) == []
    save_checkpoint(tmp_path, 10, state=state())
    assert names(tmp_path) == ["step-000010"]


@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_a_save_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path, delay):
    body = """
    step = 0
    while True:
        step += 1
        save_checkpoint(folder, step, state={"x": torch.full((200_000,), float(step))})
        print(step, flush=True)
    """
    child = save_in_child(tmp_path, body)
    assert child.stdout is not None
    with child:
        for _ in range(3):
            child.stdout.readline()
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
    found = checkpoints(tmp_path)
    assert len(found) >= 2
    for path in found:
        assert (load_checkpoint(path)["x"] == checkpoint_step(path)).all()


def test_a_full_disk_is_said_and_costs_no_older_checkpoint(tmp_path):
    """A limit on the size of files stands for the disk: both fail in write(2).

    The tensors take 400,000 bytes and a header; the rooms end in the header, in the tensors,
    and, since the text takes more than they do, in state.json.
    """
    save_checkpoint(tmp_path, 1, state=state(1.0))
    body = """
    state = {"x": torch.zeros(100_000), "text": "x" * 600_000}
    for room in (0, 5_000, 395_000, 401_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        try:
            save_checkpoint(folder, 2, state=state)
        except CheckpointError as error:
            print(error)
    """
    with save_in_child(tmp_path, body) as child:
        assert child.stdout is not None
        said = child.stdout.readlines()
    assert child.returncode == 0
    assert len(said) == 4
    for line in said:
        assert "step-000002: " in line
        assert "step-000001 is unchanged" in line
    assert names(tmp_path) == ["step-000001"]
    assert load_checkpoint(tmp_path / "step-000001")["weight"][0] == 1.0


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Cannot write.*no earlier checkpoint"):
        save_checkpoint(tmp_path / "file", 1, state=state())


def damage(path, how):
    tensors, described = path / "tensors.safetensors", path / "state.json"
    match how:
        case "tensors cut":
            os.truncate(tensors, tensors.stat().st_size - 1)
        case "tensors missing":
            tensors.unlink()
        case "tensors changed":
            data = bytearray(tensors.read_bytes())
            data[-1] ^= 1
            tensors.write_bytes(data)
        case "header changed":
            tensors.write_bytes(tensors.read_bytes().replace(b'"F32"', b'"I32"'))
        case "header cut":
            tensors.write_bytes(b"\0" * tensors.stat().st_size)
        case "state cut":
            os.truncate(described, 100)
        case "state missing":
            described.unlink()
        case "state binary":
            described.write_bytes(b"\xff\xfe\x00")
        case "state foreign":
            described.write_text("[1, 2]")
        case "state changed":
            described.write_text(described.read_text().replace('["count", 3]', '["count", 4]'))
        case "state newer":
            described.write_text(described.read_text().replace('"format": 1', '"format": 2'))


DAMAGES = {
    "tensors cut": r"tensors\.safetensors must have \d+ bytes, got \d+",
    "tensors missing": r"tensors\.safetensors is missing",
    "tensors changed": r"tensors\.safetensors was changed after it was written: weight has",
    "header changed": r"tensors\.safetensors was changed after it was written: weight has",
    "header cut": r"tensors\.safetensors cannot be read",
    "state cut": r"state\.json cannot be read",
    "state missing": r"state\.json is missing, so .* is not a checkpoint",
    "state binary": r"state\.json cannot be read",
    "state foreign": r"state\.json is not the state of a narrowcast checkpoint",
    "state changed": r"state\.json was changed after it was written",
    "state newer": r"state\.json must have layout 1, got 2",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_its_file_and_the_one_to_use(tmp_path, how):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, state=state(), keep=9)
    damage(tmp_path / "step-000002", "tensors cut")
    damage(tmp_path / "step-000003", how)
    with pytest.raises(
        CheckpointError, match=rf"{DAMAGES[how]}.* to resume from step-000001, which is intact"
    ):
        load_checkpoint(tmp_path / "step-000003")


def test_when_no_checkpoint_is_whole_that_is_said(tmp_path):
    save_checkpoint(tmp_path, 1, state=state())
    damage(tmp_path / "step-000001", "tensors cut")
    with pytest.raises(CheckpointError, match="No older checkpoint is intact"):
        load_checkpoint(tmp_path / "step-000001")


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(tmp_path / "elsewhere")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_every_kind_of_tensor_survives_the_file(tmp_path, dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    save_checkpoint(tmp_path, 1, state={"x": tensor})
    loaded = load_checkpoint(tmp_path / "step-000001")["x"]
    assert (loaded.dtype, loaded.shape) == (dtype, torch.Size(shape))
    assert torch.equal(loaded.float(), tensor.float())


@pytest.mark.gpu
def test_tensors_of_the_gpu_are_saved_and_loaded_on_the_cpu(tmp_path):
    weight = torch.arange(10.0, device="cuda")
    save_checkpoint(tmp_path, 1, state={"x": weight, "same": weight})
    loaded = load_checkpoint(tmp_path / "step-000001")
    assert loaded["x"].device.type == "cpu"
    assert torch.equal(loaded["same"], weight.cpu())


@pytest.mark.parametrize("left", ["file", "folder", "link"])
def test_what_a_killed_save_left_blocks_no_other(tmp_path, left):
    stray = tmp_path / "step-000002.tmp-1"
    match left:
        case "file":
            stray.write_text("half a checkpoint")
        case "folder":
            stray.mkdir()
            (stray / "state.json").touch()
        case "link":
            stray.symlink_to(stray.name)
    save_checkpoint(tmp_path, 2, state=state())
    assert names(tmp_path) == ["step-000002"]


def test_what_cannot_be_removed_blocks_no_save(tmp_path, monkeypatch):
    for name in ("step-000002.tmp-1", f"step-000002.tmp-{os.getpid()}", "step-000002.tmp-removed"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("narrowcast.runs.writing.rmtree", lambda *_, **__: None)
    for value in (0.0, 1.0):
        save_checkpoint(tmp_path, 2, state=state(value))
    assert load_checkpoint(tmp_path / "step-000002")["weight"][0] == 1


def test_an_old_checkpoint_behind_a_link_is_loaded_and_only_the_link_is_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, 1, state=state(1.0))
    (folder / "step-000001").rename(tmp_path / "on another disk")
    (folder / "step-000001").symlink_to(tmp_path / "on another disk")
    assert load_checkpoint(folder / "step-000001")["weight"][0] == 1
    for step in (2, 3):
        save_checkpoint(folder, step, state=state())
    assert names(folder) == ["step-000002", "step-000003"]
    assert names(tmp_path / "on another disk") == ["state.json", "tensors.safetensors"]


@pytest.mark.parametrize("kind", ["file", "nowhere", "itself"])
def test_what_only_bears_the_name_of_a_checkpoint_is_none(tmp_path, kind):
    save_checkpoint(tmp_path, 1, state=state())
    strange = tmp_path / "step-000009"
    strange.write_text("") if kind == "file" else strange.symlink_to(
        strange.name if kind == "itself" else "nowhere"
    )
    assert latest(tmp_path) == tmp_path / "step-000001"
    save_checkpoint(tmp_path, 9, state=state(2.0))
    assert load_checkpoint(strange)["weight"][0] == 2
