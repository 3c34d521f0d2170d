"""W&B's offline files, read back by their format: LevelDB's log of W&B's own messages."""

import json
import struct

import pytest

from narrowcast.report.trackers import WeightsAndBiases
from narrowcast.runs import EvalRecord, FindingRecord

wandb = pytest.importorskip("wandb", reason="needs the package wandb")
BLOCK = 32768


def messages(path):
    """Yield the messages of an offline file; the first block begins with seven bytes of its own."""
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield part
            part = b""


def rows(folder):
    """Return the rows of the one offline run of a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    found = []
    for message in messages(path):
        record = Record.FromString(message)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
            found.append({key: json.loads(text) for key, text in items.items()})
    return found


@pytest.fixture
def track(tmp_path, monkeypatch):
    """Tell W&B some records of a run that goes on from others; its home is empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def tell(records, *, earlier=()):
        tracker = WeightsAndBiases(
            tmp_path / "run", earlier=list(earlier), name="quickstart", settings={"steps": 3}
        )
        for record in records:
            tracker.take(record)
        tracker.close()
        # W&B's helper process finishes the file after the run; the end of Python waits for it.
        wandb.teardown()

    (tmp_path / "run").mkdir()
    return tell


def test_a_step_its_evaluation_and_its_findings_are_one_row(track, tmp_path, step):
    finding = FindingRecord(
        step=1, since=1, module="head", role="", what="w", why="y", action="a", advice=""
    )
    evaluated = EvalRecord(step=1, metrics={"loss": 1.5})
    track([step(1, loss=2.5), finding, finding, evaluated, step(2)])
    found = rows(tmp_path / "run")
    assert [row["_step"] for row in found] == [1, 2]
    assert (found[0]["train/loss"], found[0]["eval/loss"]) == (2.5, 1.5)
    assert found[0]["finding"] == "head: w: y; a\nhead: w: y; a"


def test_what_is_found_out_later_stands_in_the_present_row_with_its_step(track, tmp_path, step):
    finding = FindingRecord(
        step=1, since=1, module="head", role="", what="w", why="y", action="a", advice=""
    )
    track([step(1), step(2), finding])
    found = rows(tmp_path / "run")
    assert [row.get("finding") for row in found] == [None, "step 1: head: w: y; a"]


def test_a_run_that_is_continued_has_each_step_once_and_keeps_its_id(track, tmp_path, step):
    def run_id():
        (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
        return folder.name.rpartition("-")[2]

    track([step(1), step(2), step(3, loss=-3.0), step(4)])
    first = run_id()
    track([step(3, loss=3.0)], earlier=[step(1), step(2)])
    assert run_id() == first
    assert [(row["_step"], row["train/loss"]) for row in rows(tmp_path / "run")] == [
        (1, 2.0),
        (2, 2.0),
        (3, 3.0),
    ]
