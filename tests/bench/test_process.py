"""A worker's process that does not behave; what runs in it is a few words of shell."""

import queue
import time

import pytest

from narrowcast.bench import process
from narrowcast.bench.contenders import Contender
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
        inbox = queue.SimpleQueue()
        contender = Contender(name="odd", kind="torch")
        workers.append(Worker(contender, {}, folder=tmp_path / "odd", inbox=inbox, cold=False))
        return workers[-1], inbox

    yield start
    for worker in workers:
        worker.kill()


def test_an_answer_cut_off_in_the_middle_is_told_as_the_end(started):
    worker, inbox = started("""read job; printf '{"event": "rea'; kill -9 $$""")
    assert inbox.get(timeout=10) == (worker, None)
    assert worker.reason() == "died of SIGKILL"


def test_a_process_that_hangs_on_its_way_out_is_not_waited_for(started, monkeypatch):
    monkeypatch.setattr(process, "LAST_SECONDS", 0.2)
    worker, inbox = started("read job; echo 'no such GPU' >&2; exec 1>&-; exec sleep 60")
    assert inbox.get(timeout=10) == (worker, None)
    began = time.monotonic()
    assert worker.reason() == "no such GPU"
    assert time.monotonic() - began < 10


def test_a_process_that_hangs_without_a_word_is_told_as_that(started, monkeypatch):
    monkeypatch.setattr(process, "LAST_SECONDS", 0.2)
    worker, inbox = started("read job; exec 1>&-; exec sleep 60")
    assert inbox.get(timeout=10) == (worker, None)
    assert worker.reason() == "says no more and does not end"


def test_a_signal_without_a_name_is_told_by_its_number(started):
    worker, inbox = started("read job; kill -40 $$")
    assert inbox.get(timeout=10) == (worker, None)
    assert worker.reason() == "died of signal 40"
