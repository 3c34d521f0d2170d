import errno
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import narrowcast as nc
from narrowcast.cli.entry import run_command
from narrowcast.errors import CheckpointError, Interrupted
from narrowcast.runner import movable_folder
from narrowcast.runs import CheckpointRecord, RunFolder
from narrowcast.training.checkpoints.verify import difference_between

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere an open folder is not followed"
)

SMALL = ["steps=12", "batch_size=2", "model.layers=1", "model.width=16", "model.heads=2"]
SMALL += ["data.length=16", "health.every=0", "data.eval_windows=4", "checkpoint.every=1"]
WHOLE = ("recipe.yaml", "resolved.json", "environment.json", "task.json", "plan.json")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Train the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert run_command(["train", "quickstart", *SMALL, "-q", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def looking_often(monkeypatch):
    monkeypatch.setattr(movable_folder, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(movable_folder, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(movable_folder, "SETTLE_SECONDS", 0.01)


def trained_until(folder, *, step, then, kind=object):
    """Train in `folder`, call `then` after a record of `step`; return what the run ended with."""
    with nc.train("quickstart", SMALL, out=folder) as run:
        try:
            for record in run:
                if record.step == step and isinstance(record, kind) and then is not None:
                    then()
                    then = None
        except (Interrupted, CheckpointError) as ended:
            return ended, run.folder.path
    return None, run.folder.path


def require_same_after_resume(place, straight):
    assert run_command(["resume", "-q", str(place)]) == 0
    assert difference_between(straight, place) is None


def test_a_folder_that_is_removed_is_put_back_and_resumed_bit_for_bit(
    tmp_path, straight, looking_often
):
    folder = tmp_path / "run"
    ended, place = trained_until(folder, step=7, then=lambda: shutil.rmtree(folder))
    assert (type(ended), place) == (Interrupted, folder)
    assert f"the run's folder {folder} was removed; the run was put back there" in str(ended)
    assert f"resume with: narrowcast resume {folder}" in str(ended)
    assert all((folder / name).read_bytes() for name in (*WHOLE, "report.html"))
    assert RunFolder.open(folder).records()[0].step == 1
    require_same_after_resume(folder, straight)


def test_a_folder_that_is_moved_is_followed(tmp_path, straight, looking_often):
    folder, elsewhere = tmp_path / "run", tmp_path / "else" / "where"
    elsewhere.parent.mkdir()
    ended, place = trained_until(folder, step=7, then=lambda: folder.rename(elsewhere))
    assert (type(ended), place) == (Interrupted, elsewhere)
    assert f"the run's folder {folder} was moved to {elsewhere}" in str(ended)
    assert not folder.exists()
    require_same_after_resume(elsewhere, straight)


def test_what_was_put_in_the_place_of_a_removed_folder_is_not_touched(
    tmp_path, straight, looking_often
):
    folder = tmp_path / "run"

    def replace():
        shutil.rmtree(folder)
        shutil.copytree(straight, folder)

    ended, place = trained_until(folder, step=7, then=replace)
    assert (type(ended), place) == (Interrupted, tmp_path / "run-2")
    assert f"put back at {place}" in str(ended)
    assert difference_between(straight, folder) is None
    require_same_after_resume(place, straight)


def test_files_of_another_run_in_the_same_folder_are_not_mixed_with_its_own(
    tmp_path, straight, looking_often
):
    folder = tmp_path / "run"

    def replace():
        for path in list(folder.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(straight, folder, dirs_exist_ok=True)

    ended, place = trained_until(folder, step=7, then=replace)
    assert (type(ended), place) == (Interrupted, tmp_path / "run-2")
    assert difference_between(straight, folder) is None
    require_same_after_resume(place, straight)


def test_files_that_are_removed_from_the_folder_are_put_back(tmp_path, straight, looking_often):
    folder = tmp_path / "run"

    def clear():
        for path in list(folder.iterdir()):
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    ended, place = trained_until(folder, step=7, then=clear)
    assert (type(ended), place) == (Interrupted, folder)
    assert "files of the run's folder" in str(ended)
    require_same_after_resume(folder, straight)


def test_a_folder_is_put_back_where_its_parents_are_gone_too(tmp_path, straight, looking_often):
    folder = tmp_path / "a" / "b" / "run"
    ended, place = trained_until(folder, step=7, then=lambda: shutil.rmtree(tmp_path / "a"))
    assert (type(ended), place) == (Interrupted, folder)
    require_same_after_resume(folder, straight)


def test_a_folder_that_cannot_be_put_back_is_put_elsewhere(tmp_path, straight, looking_often):
    folder = tmp_path / "a" / "run"

    def remove():
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").write_text("in the way")

    ended, place = trained_until(folder, step=7, then=remove)
    assert type(ended) is Interrupted
    assert f"put back at {place}" in str(ended)
    try:
        require_same_after_resume(place, straight)
    finally:
        shutil.rmtree(place)


def test_where_no_folder_can_be_made_a_message_says_so(tmp_path, looking_often, monkeypatch):
    folder = tmp_path / "a" / "run"

    def remove():
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").write_text("in the way")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a"))

    ended, _ = trained_until(folder, step=7, then=remove)
    assert type(ended) is CheckpointError
    assert f"{folder} was removed and cannot be put back: a file is in the way" in str(ended)


def test_a_checkpoint_is_not_written_to_a_folder_that_is_gone(tmp_path, straight, monkeypatch):
    # It is looked for before each checkpoint, however long ago the last look was.
    monkeypatch.setattr(movable_folder, "LOOK_SECONDS", 1e9)
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    ended, place = trained_until(folder, step=7, then=lambda: folder.rename(elsewhere))
    assert (type(ended), place) == (Interrupted, elsewhere)
    assert not folder.exists()
    require_same_after_resume(elsewhere, straight)


def test_a_folder_that_is_moved_at_the_very_end_holds_the_whole_run(
    tmp_path, straight, monkeypatch, caplog
):
    monkeypatch.setattr(movable_folder, "LOOK_SECONDS", 1e9)
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    moved = []
    with nc.train("quickstart", SMALL, out=folder) as run:
        for record in run:
            if record.step == 12 and type(record).__name__ == "CheckpointRecord" and not moved:
                moved.append(folder.rename(elsewhere))
    assert (elsewhere / "report.html").is_file()
    assert "was moved to" in caplog.text
    assert not folder.exists()
    assert difference_between(straight, elsewhere) is None


def test_a_folder_that_is_removed_once_it_was_saved_to_is_saved_to_again(
    tmp_path, straight, monkeypatch
):
    # Between the checkpoint and the end that a signal asks for.
    monkeypatch.setattr(movable_folder, "LOOK_SECONDS", 1e9)
    folder = tmp_path / "run"

    def remove():
        shutil.rmtree(folder)
        signal.raise_signal(signal.SIGTERM)

    ended, place = trained_until(folder, step=4, then=remove, kind=CheckpointRecord)
    assert (type(ended), place) == (Interrupted, folder)
    assert "was put back there" in str(ended)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000004"]
    require_same_after_resume(folder, straight)


def test_a_folder_that_is_removed_after_the_last_checkpoint_has_it_again(
    tmp_path, straight, monkeypatch, capsys
):
    monkeypatch.setattr(movable_folder, "LOOK_SECONDS", 1e9)
    folder = tmp_path / "run"
    ended, place = trained_until(
        folder, step=12, then=lambda: shutil.rmtree(folder), kind=CheckpointRecord
    )
    assert (ended, place) == (None, folder)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000012"]
    assert difference_between(straight, folder) is None
    assert run_command(["resume", "-q", str(folder)]) == 0


def test_a_disk_that_does_not_answer_for_a_while_ends_no_run(tmp_path, straight, monkeypatch):
    monkeypatch.setattr(movable_folder, "LOOK_SECONDS", 0.0)
    answer, left = Path.stat, [0]

    def stat(path, **how):
        # Only whoever looks for the folder asks like this; a save that fails ends the run.
        if left[0] and path.name == "records.jsonl" and not how:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return answer(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    ended, place = trained_until(tmp_path / "run", step=7, then=lambda: left.append(left.pop() + 9))
    assert (ended, place, left) == (None, tmp_path / "run", [0])
    assert difference_between(straight, place) is None


def test_a_folder_that_is_away_for_a_moment_is_not_gone(tmp_path, straight, monkeypatch):
    monkeypatch.setattr(movable_folder, "LOOK_SECONDS", 0.0)
    folder, away = tmp_path / "run", tmp_path / "away"

    def vanish():
        folder.rename(away)
        threading.Timer(0.2, away.rename, [folder]).start()

    ended, place = trained_until(folder, step=7, then=vanish)
    assert (ended, place) == (None, folder)
    assert difference_between(straight, place) is None


def test_a_link_to_the_folder_may_be_pointed_elsewhere(tmp_path, straight, looking_often):
    link, first, other = (tmp_path / name for name in ("latest", "first", "other"))
    first.mkdir()
    other.mkdir()
    link.symlink_to(first)

    def point_elsewhere():
        link.unlink()
        link.symlink_to(other)

    ended, place = trained_until(link, step=7, then=point_elsewhere)
    assert (ended, place) == (None, first)
    assert list(other.iterdir()) == []
    assert difference_between(straight, first) is None


def test_a_folder_that_is_removed_behind_a_link_is_put_back_there(
    tmp_path, straight, looking_often
):
    link, folder = tmp_path / "latest", tmp_path / "run"
    folder.mkdir()
    link.symlink_to(folder)
    ended, place = trained_until(link, step=7, then=lambda: shutil.rmtree(folder))
    assert (type(ended), place) == (Interrupted, folder)
    assert "was put back there" in str(ended)
    require_same_after_resume(link, straight)


def test_a_folder_that_is_removed_is_missed_within_seconds(tmp_path, capsys):
    folder = tmp_path / "run"
    began: list[float] = []

    def remove():
        while (
            not (folder / "records.jsonl").exists() or not (folder / "records.jsonl").stat().st_size
        ):
            time.sleep(0.02)
        began.append(time.monotonic())
        shutil.rmtree(folder)

    thread = threading.Thread(target=remove)
    thread.start()
    words = [*SMALL, "steps=1000000", "checkpoint.every=0"]
    assert run_command(["train", "quickstart", *words, "-q", "--out", str(folder)]) == 130
    thread.join()
    assert time.monotonic() < began[0] + 5 * movable_folder.LOOK_SECONDS
    assert f"resume with: narrowcast resume {folder}" in capsys.readouterr().err


def test_a_run_that_leaves_its_working_directory_keeps_its_folder(
    tmp_path, straight, looking_often, monkeypatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    ended, place = trained_until(Path("run"), step=7, then=lambda: os.chdir(tmp_path))
    assert ended is None
    assert place.samefile(tmp_path / "work" / "run")
    assert difference_between(straight, place) is None
