"""A worker's process that does not behave; what runs in it is a few words of shell."""

import time

import pytest

from narrowcast.bench import process
from narrowcast.bench.process import Worker


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Start a worker whose Python is this script."""
    workers = []

    def start(script):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(process.sys, "executable", str(program))
        workers.append(Worker({}, folder=tmp_path / "odd", timeout_seconds=60, cold=False))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


def test_an_answer_cut_off_in_the_middle_ends_the_worker(started):
    worker = started("""read job; printf '{"event": "rea'; kill -9 $$""")
    assert worker.answer() is None
    assert worker.failure == "killed by SIGKILL"


def test_a_process_that_hangs_on_exit_is_not_waited_for(started, monkeypatch):
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.2)
    worker = started("read job; echo 'no such GPU' >&2; exec 1>&-; exec sleep 60")
    began = time.monotonic()
    assert worker.answer() is None
    assert worker.failure == "no such GPU"
    assert time.monotonic() - began < 10


def test_a_process_that_hangs_without_a_log_is_reported(started, monkeypatch):
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.2)
    worker = started("read job; exec 1>&-; exec sleep 60")
    assert worker.answer() is None
    assert worker.failure == "does not respond"


def test_a_signal_without_a_name_is_reported_by_number(started):
    worker = started("read job; kill -40 $$")
    assert worker.answer() is None
    assert worker.failure == "killed by signal 40"


def test_time_in_which_others_were_waited_for_counts(started):
    worker = started("read job; exec sleep 60")
    worker._requested -= 61
    assert worker.answer() is None
    assert worker.failure == "no response for 60 s, so it was stopped"


def test_a_worker_that_ended_accepts_requests_and_gives_no_answer(started):
    worker = started("read job; kill -9 $$")
    assert worker.answer() is None
    worker.request({})
    assert worker.answer() is None
    assert worker.tail() == []
