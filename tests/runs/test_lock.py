"""Whether somebody else holds the lock, asked from here of processes that do or do not."""

import signal
import subprocess
import sys

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.runs.lock import LOCK, Lock, is_held

HOLD = """
import sys, pathlib
from narrowcast.runs.lock import Lock
lock = Lock(pathlib.Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_that_was_never_taken_is_free(tmp_path):
    assert is_held(tmp_path / LOCK) is False
    (tmp_path / LOCK).touch()
    assert is_held(tmp_path / LOCK) is False


def test_a_lock_is_held_until_its_process_dies_however_it_dies(tmp_path, holder):
    assert is_held(tmp_path / LOCK) is True
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert is_held(tmp_path / LOCK) is False


def test_a_process_does_not_get_a_lock_that_it_holds_and_does_not_lose_it_either(tmp_path):
    lock, second = Lock(tmp_path / LOCK), Lock(tmp_path / LOCK)
    lock.acquire()
    lock.acquire()  # which holds it already
    with pytest.raises(CheckpointError, match="This process is already writing to"):
        second.acquire()
    second.release()
    assert is_held(tmp_path / LOCK) is True
    assert "Another process is writing" in taken_elsewhere(tmp_path / LOCK)
    lock.release()
    assert is_held(tmp_path / LOCK) is False
    assert taken_elsewhere(tmp_path / LOCK) == ""
    second.acquire()
    assert "Another process is writing" in taken_elsewhere(tmp_path / LOCK)
    second.release()


def test_a_lock_that_was_dropped_is_free(tmp_path):
    Lock(tmp_path / LOCK).acquire()
    assert is_held(tmp_path / LOCK) is False
    assert taken_elsewhere(tmp_path / LOCK) == ""


def taken_elsewhere(path):
    """Let another process take the lock; return what it says where it cannot."""
    process = subprocess.run(
        [sys.executable, "-c", HOLD, str(path)], input="", capture_output=True, text=True
    )
    return process.stderr


def test_asking_takes_nothing_from_a_process_that_comes_next(tmp_path):
    (tmp_path / LOCK).touch()
    assert is_held(tmp_path / LOCK) is False
    lock = Lock(tmp_path / LOCK)
    lock.acquire()
    lock.release()
