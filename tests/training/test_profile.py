import json

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.training.train_loop import train_loop

ASKED = {"first": 3, "steps": 2}


def test_the_steps_that_are_named_are_traced(ready, tmp_path):
    plain, looked = ready(steps=6), ready(steps=6, profile=ASKED)
    list(train_loop(plain.prepared, plain.task, plain.recipe, folder=tmp_path / "plain"))
    list(train_loop(looked.prepared, looked.task, looked.recipe, folder=tmp_path / "looked"))
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "looked" / "profile"
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)
    table = {row["operation"]: row for row in json.loads((folder / "operations.json").read_text())}
    # Three linear layers and one that is used twice, forward only, in two steps.
    assert table["aten::addmm"]["calls"] == 2 * 4
    for one, other in zip(
        plain.task.model.parameters(), looked.task.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_run_that_ends_before_writes_what_it_saw(ready, tmp_path):
    made = ready(steps=3, profile={"first": 2, "steps": 50})
    list(train_loop(made.prepared, made.task, made.recipe, folder=tmp_path))
    assert (tmp_path / "profile" / "trace.json").is_file()


def test_a_trace_without_a_folder_is_refused(ready):
    made = ready(steps=3, profile=ASKED)
    with pytest.raises(ConfigError, match="needs a run folder"):
        train_loop(made.prepared, made.task, made.recipe)
