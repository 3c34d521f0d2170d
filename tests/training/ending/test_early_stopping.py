"""A run that has stopped improving ends early, and at the same step however it was interrupted."""

import json
import math
from itertools import count

import pytest

from narrowcast.errors import CheckpointError, DivergedError
from narrowcast.runs import EvalRecord, Metric, StepRecord, TaskInfo, same_trajectory
from narrowcast.training.checkpoints.checkpoint import checkpoints, latest, load_checkpoint
from narrowcast.training.checkpoints.export import results_are_whole
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.train_loop import train_loop

# Evaluated every 2 steps: the best at step 6, and none better at 8, 10 and 12.
ERRORS = {2: 0.9, 4: 0.8, 6: 0.5, 8: 0.6, 10: 0.5, 12: 0.7, 14: 0.1}


def stopping(ready, *, better="lower", errors=ERRORS, begun=0, **settings):
    """A run whose evaluations are given; `begun` is the step it goes on from."""
    steps = count(begun + 2, 2)

    def evaluate(model):
        value = errors[next(steps)]
        return {"error": value if better == "lower" else -value}

    info = TaskInfo(metrics=(Metric(name="error", better=better),))
    settings = {"steps": 20, "eval": {"every": 2, "patience": 3}, **settings}
    settings = {"checkpoint": {"every": 5, "keep": 9}, **settings}
    return ready("bf16", parts={"evaluate": evaluate, "info": info}, **settings)


def course(made, **settings):
    return list(train_loop(made.prepared, made.task, made.recipe, **settings))


def last_step(records):
    return [r.step for r in records if isinstance(r, StepRecord)][-1]


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_run_ends_after_so_many_evaluations_without_improvement(ready, tmp_path, better):
    records = course(stopping(ready, better=better), folder=tmp_path)
    assert last_step(records) == 12
    assert [r.step for r in records if isinstance(r, EvalRecord)][-1] == 12
    assert latest(tmp_path / "checkpoints").name == "step-000012"
    assert (tmp_path / "model.safetensors").exists()
    assert results_are_whole(tmp_path, step=12)
    said = json.loads((tmp_path / "finished.json").read_text())
    told = "ended early at step 12 of 20: error had not improved for 3 evaluations"
    assert said["ended_early"] == told


def test_without_patience_all_steps_are_done_and_nothing_is_said(ready, tmp_path):
    errors = dict.fromkeys(range(2, 22, 2), 1.0)
    made = stopping(ready, errors=errors, eval={"every": 2})
    assert last_step(course(made, folder=tmp_path)) == 20
    assert "ended_early" not in json.loads((tmp_path / "finished.json").read_text())


def test_patience_that_ends_with_the_last_step_is_no_early_end(ready, tmp_path):
    course(stopping(ready, steps=12), folder=tmp_path)
    assert "ended_early" not in json.loads((tmp_path / "finished.json").read_text())


def test_an_improvement_that_is_too_small_is_none(ready):
    made = stopping(ready, eval={"every": 2, "patience": 2, "min_delta": 0.2})
    # 0.8 is too near to 0.9, and 0.5 is not.
    assert last_step(course(made)) == 10


@pytest.mark.parametrize("at", [5, 10, 12])
def test_a_resumed_run_ends_at_the_same_step_with_the_same_bits(ready, tmp_path, at):
    straight = stopping(ready)
    expected = course(straight, folder=tmp_path / "straight")
    state = load_checkpoint(tmp_path / f"straight/checkpoints/step-{at:06d}")
    resumed = stopping(ready, begun=at // 2 * 2)
    rest = course(resumed, folder=tmp_path / "resumed", resume=state)
    later = [r for r in expected if isinstance(r, StepRecord | EvalRecord) and r.step > at]
    found = [r for r in rest if isinstance(r, StepRecord | EvalRecord)]
    assert len(found) == len(later)
    assert all(map(same_trajectory, later, found))
    last = [load_checkpoint(latest(tmp_path / name / "checkpoints")) for name in
            ("straight", "resumed") if checkpoints(tmp_path / name / "checkpoints")]  # fmt: skip
    for each in last:
        each.pop("records")
    assert first_difference(last[0], last[-1]) is None
    assert first_difference(straight.prepared.state_dict(), resumed.prepared.state_dict()) is None


def test_an_ended_run_goes_on_with_more_patience(ready, tmp_path):
    course(stopping(ready), folder=tmp_path)
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    made = stopping(ready, begun=12, eval={"every": 2, "patience": 4}, steps=14)
    assert last_step(course(made, resume=state)) == 14


def test_evaluations_that_are_no_numbers_end_a_run_as_diverged(ready, tmp_path):
    made = stopping(ready, errors=dict.fromkeys(range(2, 22, 2), math.nan))
    with pytest.raises(DivergedError, match="its last evaluated error is nan"):
        course(made, folder=tmp_path)
    assert latest(tmp_path / "checkpoints").name == "step-000006"


def test_a_state_that_no_run_keeps_is_refused_by_name(ready, tmp_path):
    course(stopping(ready), folder=tmp_path)
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    state["improvement"] = {"strange": 1}
    made = stopping(ready)
    with pytest.raises(CheckpointError, match="evaluation history from the checkpoint"):
        train_loop(made.prepared, made.task, made.recipe, resume=state)
