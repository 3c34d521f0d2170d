"""Real runs that tell trackers of themselves."""

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from narrowcast.runs import RunFolder, StepRecord, same_trajectory

pytest.importorskip("tensorboard", reason="needs the package tensorboard")
pytest.importorskip("wandb", reason="needs the package wandb")


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    """W&B keeps a log of its own in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def losses(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars("train/loss")]


def saved_steps(folder):
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    return [int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)]


def recorded(folder):
    with RunFolder.open(folder) as run:
        return [r for r in run.records() if isinstance(r, StepRecord)]


def test_both_trackers_have_what_the_records_have_and_change_nothing(narrowcast, tiny, tmp_path):
    told, plain = tmp_path / "told", tmp_path / "plain"
    ended = narrowcast("train", tiny, "trackers=[tensorboard, wandb]", "--out", told)
    assert ended.code == 0
    assert "wandb" not in ended.out + ended.err
    narrowcast("train", tiny, "--out", plain)
    assert losses(told) == [(r.step, pytest.approx(r.loss, rel=2**-20)) for r in recorded(told)]
    assert len(list((told / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    pairs = zip(recorded(told), recorded(plain), strict=True)
    assert all(same_trajectory(a, b) for a, b in pairs)


def test_a_killed_run_that_is_resumed_has_each_step_once(narrowcast, start, tiny, tmp_path):
    out = tmp_path / "run"
    words = ("steps=2000", "checkpoint.every=3", "trackers=[tensorboard]", "--out", out)
    with start("train", tiny, *words) as process:
        while len(saved_steps(out)) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = max(saved_steps(out))
    assert narrowcast("resume", out, f"steps={last + 4}").code == 0
    assert [n for n, _ in losses(out)] == list(range(1, last + 5))
    assert losses(out) == [(r.step, pytest.approx(r.loss, rel=2**-20)) for r in recorded(out)]


def test_a_tracker_may_join_a_run_that_is_continued(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    narrowcast("train", tiny, "--out", out)
    assert narrowcast("resume", out, "steps=6", "trackers=[tensorboard]").code == 0
    assert [n for n, _ in losses(out)] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    narrowcast("train", tiny, "--out", out)
    (out / "tensorboard").write_text("in the way")
    ended = narrowcast("resume", out, "steps=6", "trackers=[tensorboard]")
    assert ended.code == 0
    assert ended.out.count("tensorboard failed and was disabled") == 1
    assert recorded(out)[-1].step == 6


def test_a_missing_package_is_refused_before_anything_is_made(
    narrowcast, tiny, tmp_path, monkeypatch
):
    for module in [m for m in sys.modules if m.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "wandb", None)
    ended = narrowcast("train", tiny, "trackers=[wandb]", "--out", tmp_path / "run")
    assert ended.code == 3
    assert "pip install wandb" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["trackers=[tensorbord]", "trackers=tensorboard"])
def test_a_tracker_that_does_not_exist_is_bad_input(narrowcast, tiny, tmp_path, given):
    ended = narrowcast("train", tiny, given, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "trackers" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_tracker_that_is_offline_has_no_process_that_calls_anybody(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    trace = tmp_path / "trace"
    words = ["train", tiny, "steps=1", "trackers=[wandb]", "--out", str(tmp_path / "run"), "-q"]
    command = ["strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", str(trace)]
    done = subprocess.run(
        [*command, sys.executable, "-m", "narrowcast", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "wandb").is_dir()
    called = re.findall(r"sa_family=AF_INET6?,.*", trace.read_text())
    assert called == []
