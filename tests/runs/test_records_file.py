import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.runs import CheckpointRecord, EvalRecord, RunFolder, to_line

WRITER = """
import sys
from narrowcast.runs import EvalRecord, RunFolder
with RunFolder.open(sys.argv[1]) as run:
    for step in range(1, 10**9):
        run.write(EvalRecord(step=step, metrics={"loss": 1 / step}))
"""


def checkpoint(step):
    return CheckpointRecord(step=step, seconds_blocked=0.1, seconds_total=0.2, bytes=9)


def evaluation(step):
    return EvalRecord(step=step, metrics={"loss": 1 / step})


def start_writer(path):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path)])


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the writer did not get that far"
        time.sleep(0.005)


@pytest.mark.parametrize("lines", [1, 50, 3000])
def test_a_killed_writer_leaves_whole_records_and_the_next_one_goes_on(create, lines):
    path = create().path
    writer = start_writer(path)
    wait_for(lambda: (path / "records.jsonl").stat().st_size > 40 * lines)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with RunFolder.open(path) as run:
        left = run.records()
        assert left == [evaluation(step) for step in range(1, len(left) + 1)]
        run.write(evaluation(len(left) + 1))
        assert run.records() == [evaluation(step) for step in range(1, len(left) + 2)]


def test_records_torn_at_any_byte_are_read_up_to_there_and_written_on(create):
    run = create()
    file = run.path / "records.jsonl"
    records = [evaluation(1), evaluation(2), checkpoint(2)]
    content = "".join(to_line(record) + "\n" for record in records).encode()
    for size in range(len(content) + 1):
        file.write_bytes(content[:size])
        # A record is whole with its last brace; the line's end may still be missing.
        whole = (content[:size] + b"\n").count(b"}\n")
        with RunFolder.open(run.path) as again:
            assert again.records() == records[:whole]
            assert file.read_bytes() == content[:size], "reading changed the file"
            again.write(evaluation(9))
        assert RunFolder.open(run.path).records() == [*records[:whole], evaluation(9)]


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff\xfe", b'{"kind": "eval", "st', b"{}"])
def test_whatever_a_power_cut_leaves_behind_the_last_line_is_dropped(create, tail):
    run = create()
    run.write(evaluation(1))
    run.close()
    with (run.path / "records.jsonl").open("ab") as file:
        file.write(tail)
    run.write(evaluation(2))
    assert run.records() == [evaluation(1), evaluation(2)]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b'{"kind": "new", "step": 1}'])
def test_damage_before_the_last_line_is_refused_with_its_line_and_kept(create, damage):
    run = create()
    content = to_line(evaluation(1)).encode() + b"\n" + damage + b"\n"
    (run.path / "records.jsonl").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"records.jsonl is damaged in line 2: .*from a copy"):
        run.records()
    with pytest.raises(CheckpointError, match=r"damaged in line 2"):
        run.write(evaluation(2))
    with pytest.raises(CheckpointError, match=r"damaged in line 2"):
        run.rewind(1)
    assert (run.path / "records.jsonl").read_bytes() == content


COURSE = [evaluation(1), evaluation(2), checkpoint(2), evaluation(3), checkpoint(4), evaluation(5)]


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (2, 3),
        (4, 5),
        # Killed after the checkpoint was complete and before it was recorded.
        (5, 6),
        (3, 4),
        (1, 1),
        (0, 0),
        (9, 6),
    ],
)
@pytest.mark.parametrize("tail", ["", '{"kind": "ev'])
def test_rewinding_keeps_the_records_up_to_the_checkpoint(create, step, kept, tail):
    with create() as run:
        for record in COURSE:
            run.write(record)
    with (run.path / "records.jsonl").open("a") as file:
        file.write(tail)
    with RunFolder.open(run.path) as again:
        again.rewind(step)
        assert again.records() == COURSE[:kept]
        again.write(evaluation(8))
    assert RunFolder.open(run.path).records() == [*COURSE[:kept], evaluation(8)]


def test_rewinding_keeps_what_was_found_late_but_written_before_the_checkpoint(create):
    course = [evaluation(1), evaluation(3), checkpoint(2), evaluation(4)]
    with create() as run:
        for record in course:
            run.write(record)
        run.rewind(2)
        assert run.records() == course[:3]


def test_a_record_without_its_line_end_survives_rewinding(create):
    run = create()
    (run.path / "records.jsonl").write_text(to_line(checkpoint(1)))
    with run:
        run.rewind(1)
        run.write(evaluation(2))
    assert run.records() == [checkpoint(1), evaluation(2)]


def test_a_second_writer_is_refused_while_the_first_lives_and_welcome_once_it_is_dead(create):
    path = create().path
    writer = start_writer(path)
    wait_for(lambda: (path / "records.jsonl").stat().st_size > 0)
    with RunFolder.open(path) as run:
        with pytest.raises(CheckpointError, match=r"Another process is writing to .*run"):
            run.rewind(0)
        assert run.records() != []
        writer.kill()
        writer.wait()
        run.rewind(0)
        assert run.records() == []


FORKING = """
import os, signal, sys, time
from narrowcast.runs import EvalRecord, RunFolder
run = RunFolder.open(sys.argv[1])
run.write(EvalRecord(step=1))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
signal.pause()
"""


def test_a_data_worker_that_outlives_a_killed_run_does_not_keep_it_locked(create):
    path = create().path
    code = [sys.executable, "-c", FORKING, str(path)]
    with subprocess.Popen(code, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        worker = int(writer.stdout.readline())
        try:
            writer.kill()
            with RunFolder.open(path) as run:
                writer.wait()
                run.write(EvalRecord(step=2))
                assert [record.step for record in run.records()] == [1, 2]
        finally:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_writing_to_a_folder_that_was_moved_or_removed_raises(create, how):
    with create() as run:
        run.write(evaluation(1))
        if how == "removed":
            shutil.rmtree(run.path)
        else:
            run.path.rename(run.path.with_name("elsewhere"))
        if how == "replaced":
            run.path.mkdir()
            (run.path / "records.jsonl").touch()
        with pytest.raises(CheckpointError, match="was moved or removed while the run was writing"):
            run.write(evaluation(2))
