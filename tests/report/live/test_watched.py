import json
import math
import shutil
import time

import pytest

from narrowcast.report.live.watched import Cursor, WatchedRun
from narrowcast.runs import (
    CheckpointRecord,
    EvalRecord,
    FindingRecord,
    PrecisionRecord,
    RunFolder,
    to_line,
)
from narrowcast.runs.follow import LOOK_BYTES


@pytest.fixture
def write():
    """Append records to the run in a folder."""

    def add(folder, *records):
        with RunFolder.open(folder) as run:
            for record in records:
                run.write(record)

    return add


def saved(number):
    return CheckpointRecord(step=number, seconds_blocked=0.0, seconds_total=0.0, bytes=1)


def test_a_run_without_records_is_starting(make_run, open_page):
    page = open_page(make_run([], steps=10)).look()
    assert page.head["state"]["label"] == "Starting"
    assert page.head["title"] == "quickstart in fp16"
    assert (page.head["progress"], page.head["facts"]) == ("", [])


def test_a_page_is_told_what_is_new_and_nothing_else(make_run, open_page, write, step):
    folder = make_run([step(n) for n in range(1, 400)], steps=1000)
    page = open_page(folder).look()
    assert page.steps == list(range(1, 400))
    assert page.look().told == {}
    write(folder, step(400), EvalRecord(step=400, metrics={"loss": 1.5}))
    page.look()
    assert "reset" not in page.told
    assert len(json.dumps(page.told)) < 3000
    assert [len(rows) for _, rows in page.told["lists"].values()] == [2, 2, 2, 2, 2, 2, 1]
    assert page.steps == list(range(1, 401))
    assert page.evals == [["400", {"loss": "1.500"}]]
    assert page.head["progress"] == "Step 400 of 1,000"


def test_a_page_that_follows_knows_what_a_page_that_is_opened_later_does(
    make_run, open_page, write, step, course
):
    records = course(2500, eval_every=100)
    folder = make_run([], steps=2500)
    early = open_page(folder)
    for first in range(0, len(records), 700):
        write(folder, *records[first : first + 700])
        early.look()
    late = open_page(folder).look()
    assert early.lists == late.lists
    assert early.events == late.events
    assert early.evals == late.evals
    assert early.head == late.head


def test_a_run_that_is_resumed_is_told_afresh(make_run, open_page, write, step):
    records = [*(step(n) for n in range(1, 5)), saved(4), *(step(n) for n in (5, 6))]
    folder = make_run(records, steps=10)
    page = open_page(folder).look()
    assert page.steps == [1, 2, 3, 4, 5, 6]
    with RunFolder.open(folder) as run:
        run.rewind(4)
        for n in (5, 6, 7):
            run.write(step(n, loss=1.0, seconds=0.3))
    page.look()
    assert page.told["reset"]
    assert page.steps == [1, 2, 3, 4, 5, 6, 7]
    assert page.lists["loss"][-1][0] == 1.0


def test_the_recipe_is_read_again_when_a_run_is_continued(make_run, open_page, step):
    folder = make_run([step(1), step(2), saved(2)], steps=2)
    page = open_page(folder).look()
    assert page.head["progress"] == "Step 2 of 2"
    with RunFolder.open(folder) as run:
        settings = run.read_json("resolved.json")
        settings["steps"]["value"] = 8
        run.write_json("resolved.json", settings)
        run.add_session({"started": "later"})
        run.rewind(2)
        run.write(step(3))
    time.sleep(2)
    page.look()
    assert page.head["progress"] == "Step 3 of 8"
    assert page.head["began"].endswith("resumed 1 time")


def test_a_folder_that_disappears_leaves_what_was_read(make_run, open_page, step):
    folder = make_run([step(1)], steps=10)
    page = open_page(folder).look()
    shutil.rmtree(folder)
    page.look()
    assert page.head["state"]["label"] == "Folder removed"
    assert page.steps == [1]
    make_run([step(1, seconds=0.7), step(2)], steps=10)
    assert page.look().steps == [1, 2]


def test_findings_and_changes_come_as_they_are_written(make_run, open_page, write, step):
    folder = make_run([step(1)], steps=10)
    page = open_page(folder).look()
    texts = {"module": "head", "role": "input", "what": "saturates", "why": "w", "action": "a"}
    write(
        folder,
        FindingRecord(step=1, since=1, advice="try", **texts),
        PrecisionRecord(step=1, module="head", before="e4m3", after="bf16", reason="saturates"),
    )
    page.look()
    assert [event["kind"] for event in page.told["events"]] == ["finding", "format"]
    assert page.told["events"][0]["action"] == "a; try"
    assert page.lists["changes"] == [[1, 1, "head e4m3 → bf16"]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1.7e308, -1.7e308, 5e-324, 0.0])
def test_whatever_number_a_record_holds_is_told_as_strict_json(make_run, step, bad):
    fields = ("loss", "loss_scale", "grad_norm", "lr", "lost_updates", "seconds")
    records = [step(n, **dict.fromkeys(fields, bad), applied=n % 2 == 0) for n in range(1, 80)]
    folder = make_run([*records, step(80), EvalRecord(step=80, metrics={"loss": bad})], steps=100)
    _, told = WatchedRun(folder).since(Cursor())
    json.dumps(told, allow_nan=False)
    assert told["head"]["progress"] == "Step 80 of 100"


@pytest.mark.parametrize(
    "damage",
    [
        "[]",
        "null",
        '{"steps": 3}',
        '{"steps": {"value": "x"}}',
        "{",
        '{"steps": {"value": 1%s}}' % ("0" * 400),
        '{"sessions": [1, {"started": []}]}',
    ],
)
def test_a_damaged_recipe_does_not_hide_the_records(make_run, open_page, step, damage):
    folder = make_run([step(1)], steps=10)
    (folder / "resolved.json").write_text(damage)
    (folder / "environment.json").write_text(damage)
    page = open_page(folder).look()
    assert page.steps == [1]


def test_damaged_lines_are_counted(make_run, open_page, step):
    folder = make_run([step(1)], steps=10)
    with (folder / "records.jsonl").open("a") as file:
        file.write("nonsense\n")
    assert open_page(folder).look().head["damaged"] == 1


def test_a_run_too_long_for_one_look_is_said_to_be_read(make_run, open_page, step):
    folder = make_run([], steps=10)
    line = to_line(step(1)) + "\n"
    (folder / "records.jsonl").write_text(line * (LOOK_BYTES // len(line) + 10))
    page = open_page(folder).look()
    assert page.head["state"]["label"] == "Reading"
    assert page.look().head["state"]["label"] != "Reading"


def test_ten_thousand_steps_are_read_quickly_and_told_in_little(make_run, course):
    folder = make_run(course(10_000, eval_every=100), steps=10_000)
    watched, began = WatchedRun(folder), time.thread_time()  # others may be at work here
    _, told = watched.since(Cursor())
    assert time.thread_time() - began < 2
    assert len(json.dumps(told)) < 400_000
    assert told["head"]["progress"] == "Step 10,000 of 10,000"


def test_a_page_is_told_what_the_task_counts_and_is_judged_by(
    make_run, open_page, classifier, classifier_course
):
    page = open_page(make_run(classifier_course, steps=300, task=classifier)).look()
    assert page.head["titles"] == {
        "speed": "Series per second",
        "headline": "Evaluated accuracy",
    }
    assert (page.head["better"], page.head["ticks"]) == ("Higher is better.", ".3~p")
    assert {"Evaluated accuracy", "Series per second"} <= {f["label"] for f in page.head["facts"]}
    assert [row[2] for row in page.lists["headline"]] == [0.6, 0.7, 0.8]
    assert [row[2] for row in page.lists["evaluated"]] == [2.0, 2.0, 2.0]
    assert page.evals[-1] == ["300", {"loss": "2.000", "accuracy": "80.0%"}]
    assert len(page.lists["part:sparsity"]) == 300


def test_a_page_of_a_loss_of_one_piece_gets_no_parts(run_folder, open_page):
    page = open_page(run_folder).look()
    assert not [name for name in page.lists if name.startswith("part:")]
    assert page.head["titles"]["speed"] == "Tokens per second"


def test_a_damaged_account_of_the_task_does_not_end_the_page(run_folder, open_page):
    (run_folder / "task.json").write_text('{"metrics": 3}')
    assert open_page(run_folder).look().head["titles"]["speed"] == "Tokens per second"
