"""Real processes, one at a time; what they train is as small as it gets."""

import pytest

from narrowcast.bench.zoo import running
from narrowcast.bench.zoo.running import Asked, measure_models

MINE = """\
import torch
from torch import nn


def build():
    return nn.Linear(4, 1), lambda model, x: model(x).square().mean(), torch.ones(2, 4)


def raises():
    raise OSError("no such corpus")
"""


@pytest.fixture(autouse=True)
def _own(tmp_path, monkeypatch):
    (tmp_path / "zoo_of_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def measured(tell=print, **settings):
    return measure_models(Asked(modes=("eager",), **settings), tell=tell)


def test_the_next_process_may_start_ahead_of_its_turn(monkeypatch):
    monkeypatch.setattr(running, "CORES_TO_START_AHEAD", 1)
    told = []
    zoo = measured(
        told.append, mine="zoo_of_mine:build", only=("lstm",), ways=("amp",), quick=True
    )
    rows = {row["model"]: row for row in zoo.data["rows"]}
    assert list(rows) == ["lstm", "zoo_of_mine:build"]
    assert not any(row["failure"] for row in rows.values())
    assert [line.partition(": ")[2] for line in told].count("starting") == 2
    assert zoo.left_out == ()


def test_a_row_that_raises_says_so_and_keeps_its_log():
    zoo = measured(mine="zoo_of_mine:raises", ways=("amp",))
    (row,) = zoo.data["rows"]
    assert row["failure"] == "OSError: no such corpus"
    assert any("Traceback" in line for line in row["log"])


def test_a_row_that_says_nothing_is_ended():
    zoo = measured(mine="zoo_of_mine:build", ways=("amp",), timeout_seconds=0.1)
    (row,) = zoo.data["rows"]
    assert row["failure"] == "no answer for 0.1 s, so it was ended"
