"""A full disk: as a limit on file size, which every user can set, and as a small real disk."""

import os
import subprocess
import sys

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.runs import EvalRecord, RunFolder
from narrowcast.runs.writing import explain_write_error, replace_file

FILLER = """
import resource, sys
from narrowcast.errors import CheckpointError
from narrowcast.runs import EvalRecord, RunFolder
run = RunFolder.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    if sys.argv[2] == "records":
        for step in range(1000):
            run.write(EvalRecord(step=step, metrics={"loss": 0.5}))
    else:
        run.write_json("plan.json", ["x" * 2000])
except CheckpointError as error:
    sys.exit(f"told: {error}")
"""


def fill(path, what):
    code = [sys.executable, "-c", FILLER, str(path), what]
    return subprocess.run(code, check=False, capture_output=True, text=True).stderr


def names(path):
    return sorted(file.name for file in path.iterdir())


def test_records_beyond_the_limit_are_refused_and_the_file_ends_in_a_whole_line(create):
    run = create()
    told = fill(run.path, "records")
    assert told.startswith("told: Cannot write to ")
    assert "raise it" in told
    assert f"narrowcast resume {run.path}" in told
    content = (run.path / "records.jsonl").read_bytes()
    # As many whole lines as fit: the next would have gone over the limit.
    assert content.endswith(b"}\n")
    assert 1000 - len(content) < 50
    assert [record.step for record in run.records()] == list(range(content.count(b"\n")))


def test_a_json_file_beyond_the_limit_is_refused_and_the_old_one_stays(create):
    run = create()
    run.write_json("plan.json", {"old": True})
    before = names(run.path)
    told = fill(run.path, "plan")
    assert told.startswith("told: Cannot write ")
    assert run.read_json("plan.json") == {"old": True}
    assert names(run.path) == before


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def make(path):
    return RunFolder.create(path, recipe_text="a: 1\n", resolved={}, environment={})


def write_many(run):
    for step in range(10_000):
        run.write(EvalRecord(step=step, metrics={"loss": 0.5}))


def test_a_full_disk_leaves_whole_records_and_the_old_files(small_disk):
    with make(small_disk / "run") as run:
        run.write_json("plan.json", {"old": True})
        with pytest.raises(CheckpointError, match="the disk is full; free some space"):
            write_many(run)
        with pytest.raises(CheckpointError, match="the disk is full; free some space"):
            run.write_json("plan.json", {"new": "x" * 5000})
        assert run.read_json("plan.json") == {"old": True}
        steps = [record.step for record in run.records()]
        assert steps == list(range(len(steps)))
        assert len(steps) > 100
        assert ".plan.json.tmp" not in names(run.path)
        run.rewind(3)
        run.write(EvalRecord(step=4))
        assert [record.step for record in run.records()] == [0, 1, 2, 3, 4]


def test_a_run_folder_that_finds_no_space_is_not_left_half_made(small_disk):
    (small_disk / "filler").write_bytes(b"x" * 2**16)
    with pytest.raises(CheckpointError, match=r"the disk is full; free some space.*another --out"):
        make(small_disk / "deep" / "run")
    assert names(small_disk) == ["filler"]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    replace_file(tmp_path / "x", b"old")
    held = (tmp_path / "x").open("rb")
    replace_file(tmp_path / "x", b"new content")
    with held:
        assert held.read() == b"old"
    assert (tmp_path / "x").read_bytes() == b"new content"
    assert names(tmp_path) == ["x"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="x"):
        replace_file(tmp_path / "x", b"new")
    assert names(tmp_path) == ["x"]


def test_an_error_without_advice_is_told_in_the_systems_words():
    assert explain_write_error(OSError(5, os.strerror(5))) == os.strerror(5)
