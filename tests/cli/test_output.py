import io
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.fork_server import ForkedPopen

from narrowcast.cli.output import open_output
from narrowcast.training.checkpoints.checkpoint import latest

SMALL = ("quickstart", "steps=6", "batch_size=2", "model.layers=1", "model.width=16")
SMALL += ("model.heads=2", "data.length=16", "health.every=0", "data.eval_windows=4")


def train(folder, *words, **options):
    return ForkedPopen(
        [sys.executable, "-m", "narrowcast", "train", *SMALL, *words, "--out", str(folder)],
        **options,
    )


def is_whole(folder):
    """Say whether a run has written all that a run writes."""
    names = ("records.jsonl", "model.safetensors", "report.html", "plan.json")
    return all((folder / name).is_file() for name in names) and latest(folder / "checkpoints")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_a_run_whose_output_is_closed_goes_on_to_its_end(tmp_path):
    words = " ".join([sys.executable, "-m narrowcast train", *SMALL, "--out run"])
    done = subprocess.run(["sh", "-c", f"{words} >&- 2>&-"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert is_whole(tmp_path / "run")


@pytest.mark.skipif(sys.platform == "win32", reason="needs /dev/full")
def test_a_run_whose_output_is_full_goes_on_to_its_end(tmp_path):
    with (
        Path("/dev/full").open("wb") as full,
        train(tmp_path / "run", stdout=full, stderr=full) as process,
    ):
        assert process.wait(timeout=120) == 0
    assert is_whole(tmp_path / "run")


def test_a_run_whose_reader_has_seen_enough_goes_on_to_its_end(tmp_path):
    with train(tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 0
    assert is_whole(tmp_path / "run")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such terminals")
def test_a_run_whose_terminal_vanishes_while_it_draws_a_bar_goes_on_to_its_end(tmp_path):
    master, terminal = os.openpty()
    with ExitStack() as stack:
        stack.callback(os.close, terminal)
        process = train(
            tmp_path / "run",
            "steps=200",
            "data.workers=1",
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )
        stack.enter_context(process)
        wait_for_steps(tmp_path / "run", process, drain=master)
        os.close(master)
        assert process.wait(timeout=120) == 0
    assert is_whole(tmp_path / "run")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(tmp_path):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with train(tmp_path / "run", "steps=100000", "data.workers=1", **options) as process:
        wait_for_steps(tmp_path / "run", process)
        os.killpg(process.pid, signal.SIGHUP)  # to all of its processes, as a terminal sends it
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Resume with: narrowcast resume" in said.decode()
    assert latest(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.skipif(sys.platform == "win32", reason="needs /dev/full")
@pytest.mark.parametrize(("words", "code"), [(["recipes"], 2), (["--help"], 2)])
def test_a_command_that_only_prints_says_so_where_it_cannot(words, code):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "narrowcast", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == code
    assert done.stderr == b"narrowcast: cannot write the output: No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs /dev/full")
def test_an_error_that_nobody_hears_keeps_its_exit_code():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "narrowcast", "train", "knitting"], stderr=full, check=False
        )
    assert done.returncode == 2


def wait_for_steps(folder, process, *, drain=None):
    """Wait until a run has recorded a step, reading what it prints where that is `drain`."""
    records, until = folder / "records.jsonl", time.monotonic() + 60
    if drain is not None:
        os.set_blocking(drain, False)
    while time.monotonic() < until and process.poll() is None:
        if drain is not None:
            with suppress(BlockingIOError):
                os.read(drain, 2**16)
        if records.exists() and b'"kind": "step"' in records.read_bytes():
            return
        time.sleep(0.02)
    pytest.fail("the run recorded no step")


def test_a_console_of_windows_keeps_its_own_stream(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    open_output()
    assert sys.stdout is stream
    assert sys.stderr is not None
