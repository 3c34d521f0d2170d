"""Real processes, timed one at a time; what they train is as small as it gets."""

import pytest

from narrowcast.bench.zoo import running
from narrowcast.bench.zoo.running import ZooRequest, measure_models
from narrowcast.bench.zoo.ways import trials

MINE = """\
import os
import time
from pathlib import Path

import torch
from torch import nn


def build():
    return nn.Linear(4, 1), lambda model, x: model(x).square().mean(), torch.ones(2, 4)


def raises():
    raise OSError("no such corpus")


def raises_late():
    time.sleep(0.5)
    raises()


def sleeps():
    time.sleep(60)


def meets():
    # Waits for another process that is set up at the same time.
    Path(f"{os.getpid()}.here").touch()
    until = time.monotonic() + 60
    while len(list(Path().glob("*.here"))) < 2:
        if time.monotonic() > until:
            raise TimeoutError("nobody came")
        time.sleep(0.01)
    return build()


def first_fails():
    try:
        Path("first").touch(exist_ok=False)
    except FileExistsError:
        return build()
    raise OSError("no room beside others")
"""


@pytest.fixture(autouse=True)
def _own(forked_python, tmp_path, monkeypatch):
    (tmp_path / "zoo_of_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def measured(log=print, **settings):
    return measure_models(ZooRequest(modes=("eager",), **settings), log=log)


def overlap(one, other):
    return one[0] < other[1] and other[0] < one[1]


def test_rows_of_a_group_are_set_up_together_and_timed_one_at_a_time():
    zoo = measured(mine="zoo_of_mine:meets", ways=("amp", "bf16"), together=2)
    rows = zoo.data["rows"]
    assert [(row["failure"], row["together"]) for row in rows] == [("", 2)] * 2
    for row in rows:
        others = [each["spans"] for each in rows if each is not row]
        timing = row["spans"]["timing"]
        assert not any(overlap(timing, span) for spans in others for span in spans.values())
    first, second = (row["spans"] for row in rows)
    assert overlap(first["setting_up"], second["setting_up"])


def test_compiled_rows_are_in_groups_of_their_own():
    rows = trials(["unet", "lstm"], ways=["amp", "bf16"], modes=["eager", "compiled"])
    groups = running._groups(rows, 3)
    assert [[trial.mode for trial in group] for group in groups] == [
        ["compiled"] * 3, ["compiled"], ["eager"] * 3, ["eager"],
    ]  # fmt: skip
    assert {trial for group in groups for trial in group} == set(rows)
    assert running._groups(rows, 1) == [(trial,) for trial in rows]


def test_a_row_that_fails_beside_others_is_tried_again_alone(tmp_path):
    lines = []
    path = tmp_path / "rows.json"
    settings = {"mine": "zoo_of_mine:first_fails", "ways": ("amp", "bf16"), "results_path": path}
    zoo = measured(lines.append, together=2, **settings)
    rows = zoo.data["rows"]
    assert [row["failure"] for row in rows] == ["", ""]
    alone, beside = sorted(rows, key=lambda row: row["together"])
    assert (alone["together"], beside["together"]) == (1, 2)
    name = f"{alone['model']}, {alone['way']}, eager"
    assert f"{name}: OSError: no room beside others" in lines
    assert f"{name}: will be retried alone" in lines
    assert alone["spans"]["setting_up"][0] > beside["spans"]["timing"][1]

    lines.clear()
    measured(lines.append, **settings)
    assert lines == ["2 of 2 rows are in the file already"]


def test_a_row_that_fails_alone_too_has_failed_with_its_log():
    lines = []
    zoo = measured(lines.append, mine="zoo_of_mine:raises", ways=("amp", "bf16"), together=2)
    for row in zoo.data["rows"]:
        assert row["failure"] == "OSError: no such corpus"
        assert any("Traceback" in line for line in row["log"])
    assert sum(line.endswith(": starting") for line in lines) == 4
    assert sum("will be retried alone" in line for line in lines) == 2


def test_failed_rows_are_left_out_if_there_is_no_time_to_try_again():
    lines = []
    settings = {"mine": "zoo_of_mine:raises_late", "ways": ("amp", "bf16"), "together": 2}
    zoo = measured(lines.append, seconds=0.5, **settings)
    assert zoo.data["rows"] == []
    assert [trial.way for trial in zoo.left_out] == ["AMP", "bf16"]
    assert lines[-1] == "0.5 s have passed: no more rows are started"


def test_a_row_without_an_answer_is_ended():
    zoo = measured(mine="zoo_of_mine:sleeps", ways=("amp",), timeout_seconds=0.1)
    (row,) = zoo.data["rows"]
    assert row["failure"] == "no response for 0.1 s, so it was stopped"
