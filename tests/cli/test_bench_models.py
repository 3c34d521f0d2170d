import json
import os
import signal

import pytest

from narrowcast.cli.bench import _repeated

MINE = """\
import os
from pathlib import Path

import torch
from torch import nn


def build():
    Path(f"{os.getpid()}.process").touch()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    return model, lambda model, x: model(x).square().mean(), torch.ones(2, 4)


def vector():
    return build()[0], lambda model, x: model(x), torch.ones(2, 4)
"""


@pytest.fixture
def own(forked_python, tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rows_are_saved_and_continued(narrowcast, own):
    written = own / "rows.json"
    words = ["bench", "models", "--quick", "--modes", "eager", "--json", written]
    ended = narrowcast(*words, "--only", "lstm", "llama-348m", "--ways", "amp", "--seconds", 1e-6)
    assert ended.code == 0
    assert "left out, 2 rows: lstm, AMP, eager; llama-348m, AMP, eager" in ended.out
    assert json.loads(written.read_text())["left_out"]

    ended = narrowcast(*words, "--mine", "own_model:build", "--ways", "amp", "liger")
    assert ended.code == 0
    assert "own_model:build, AMP, eager: starting" in ended.err
    found = json.loads(written.read_text())
    figures = {row["way"]: row for row in found["rows"]}
    plain, liger = figures["AMP"], figures["AMP + Liger"]
    assert plain["parameters"] == 4 * 8 + 8 + 8 + 1
    assert plain["ms"] == min(plain["rounds_ms"]) > 0
    assert plain["first_step_seconds"] > 0
    assert liger["failure"]  # not installed, or it knows no such model

    ended = narrowcast(*words, "--mine", "own_model:build", "--ways", "amp")
    assert "1 of 1 rows are in the file already" in ended.err
    assert "starting" not in ended.err
    assert f"{plain['ms']:.2f}" in ended.out


def test_an_error_of_the_users_builder_is_reported_once(narrowcast, own):
    ended = narrowcast("bench", "models", "--mine", "own_model:vector", "--modes", "eager")
    assert ended.code == 2
    assert ended.err.count("vector() has a loss of 2 × 1 numbers. Return its mean") == 2  # and why
    assert ended.err.count("starting") == 1


def test_a_group_that_is_ended_ends_all_its_processes_and_keeps_its_rows(start, own):
    written = own / "rows.json"
    words = ["--mine", "own_model:build", "--ways", "amp", "ours", "--modes", "eager"]
    bench = start("bench", "models", *words, "--together", 2, "--json", written)
    assert any(" ms, first step " in line for line in bench.stderr)
    bench.send_signal(signal.SIGTERM)
    table, error = bench.communicate(timeout=60)
    assert bench.returncode == 130, error
    found = json.loads(written.read_text())
    assert found["interrupted"]
    assert 1 <= len(found["rows"]) <= 2  # others of the group may have been timed by then
    assert f"left out, {4 - len(found['rows'])} rows" in table
    built = [int(path.stem) for path in own.glob("*.process")]
    assert len(built) >= 2
    for number in built:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_single_rows_are_named_and_set_up_together(narrowcast, own):
    words = ["--mine", "own_model:build", "--modes", "eager", "--together", 2]
    ended = narrowcast("bench", "models", *words, "--ways", "amp", "bf16 + split")
    assert ended.code == 0
    assert [" ms, first step " in line for line in ended.err.splitlines()] == [False] * 2 + [
        True
    ] * 2
    assert "bf16 + split" in ended.out
    assert "* set up in parallel" in ended.out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--only", "resnet50"], "Did you mean resnet-50?"),
        (["--quick", "--ways", "amp", "apm"], ", got apm"),
        (["--together", "0"], "0 is not in the range x>=1"),
        (["--mine", "model.py"], "must be package.module:build"),
        (["--json", "rows"], "must end in .json"),
        (["--json", "no-such-folder/a.json"], "there is no folder 'no-such-folder'"),
    ],
)
def test_wrong_options_raise_before_anything_is_measured(narrowcast, words, answer):
    ended = narrowcast("bench", "models", *words)
    assert ended.code == 2
    assert answer in ended.err


def test_a_list_ends_with_the_next_option():
    words = ["--only", "a", "b", "--quick", "--ways", "c", "--json", "d.json"]
    assert _repeated(words) == [
        "--only", "a", "--only", "b", "--quick", "--ways", "c", "--json", "d.json",
    ]  # fmt: skip
