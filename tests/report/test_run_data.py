import json

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.report.run_data import PLAN, read_run
from narrowcast.runner.fitting import Prediction
from narrowcast.runs.shape import misfit


def test_every_record_of_a_run_is_in_its_data(run_folder):
    lines = (run_folder / "records.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    data = read_run(run_folder)
    found = {
        "step": data.steps,
        "eval": data.evals,
        "finding": data.findings,
        "checkpoint": data.checkpoints,
        "precision": data.changes,
    }
    assert {kind: len(records) for kind, records in found.items()} == {
        kind: kinds.count(kind) for kind in found
    }


def test_a_torn_last_line_is_not_part_of_the_data(run_folder):
    before = read_run(run_folder)
    with (run_folder / "records.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert read_run(run_folder) == before


def test_what_a_run_did_not_come_to_write_is_empty(make_run):
    path = make_run([], steps=5)
    (path / "environment.json").unlink()
    (path / "recipe.yaml").unlink()
    data = read_run(path)
    assert (data.plan, data.sessions, data.recipe_text) == (None, (), "")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder"):
        read_run(tmp_path)


def test_a_folder_that_does_not_say_what_it_counts_counts_tokens(run_folder):
    assert read_run(run_folder).task.units == "tokens"


def test_what_a_run_counts_is_read_from_its_folder(make_run, step, classifier):
    folder = make_run([step(1)], steps=1, task=classifier)
    assert read_run(folder).task == classifier


def test_plans_without_a_prediction_are_read() -> None:
    prediction = Prediction(plans=(), memory=None, seconds=None, missing="no shapes")
    assert misfit({"predicted": prediction.to_json()}, PLAN) is None
