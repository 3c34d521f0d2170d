import math

import pytest
import torch

from narrowcast.errors import DivergedError
from narrowcast.runs import CheckpointRecord, EvalRecord, FindingRecord, Metric, TaskInfo
from narrowcast.training.checkpoints.checkpoint import checkpoints, latest, load_checkpoint
from narrowcast.training.task import Hook
from narrowcast.training.train_loop import train_loop
from narrowcast.training.vital_signs import bad_weights


def ended(made, **settings):
    """Train until a run diverges; return its records and what it says."""
    records = []
    try:
        for record in train_loop(made.prepared, made.task, made.recipe, **settings):
            records.append(record)
    except DivergedError as error:
        return records, str(error)
    return pytest.fail("the run is said to be done")


def with_loss(bad_from):
    """Return a loss that is not finite from some step on."""
    passes = []

    def loss(model, batch):
        passes.append(1)
        error = (model(batch[0]) - batch[1]).square().mean()
        return error * (math.nan if len(passes) >= bad_from else 1.0)

    return loss


def overflowing_from(step, names=("rise.weight",)):
    """Return a hook with which an update overflows."""
    taken = []

    def after_step(prepared, applied):
        taken.append(1)
        if len(taken) == step:
            for name, weight in prepared.model.named_parameters():
                if name in names:
                    weight.view(-1)[0] = math.inf

    return Hook(name="overflow", after_step=after_step)


def test_a_run_whose_last_evaluation_is_not_finite_has_diverged_with_all_it_has_to_leave(
    ready, tmp_path
):
    made = ready(steps=4).but(evaluate=lambda model: {"error": math.nan})
    records, said = ended(made, folder=tmp_path)
    assert isinstance(records[-1], CheckpointRecord)
    assert any(isinstance(r, EvalRecord) for r in records)
    found = next(r for r in records if isinstance(r, FindingRecord))
    assert found.why.endswith("on weights that are finite")
    assert said.startswith("The run has diverged: its last evaluated error is nan. Try a lower opt")
    assert said.endswith("was not written. The weights are in the last checkpoint")
    assert not (tmp_path / "model.safetensors").exists()

    again = ready(steps=4)  # whose evaluation would be finite
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    none, still = ended(again, folder=tmp_path, resume=state)
    assert (none, still) == ([], said)

    # More steps may heal it.
    longer = ready(steps=6)
    assert list(
        train_loop(longer.prepared, longer.task, longer.recipe, folder=tmp_path, resume=state)
    )
    assert (tmp_path / "model.safetensors").exists()


def test_weights_that_an_update_made_infinite_are_named_and_not_exported(ready, tmp_path):
    hook = overflowing_from(5, names=("rise.weight", "fall.bias"))
    made = ready(steps=8, checkpoint={"every": 2, "keep": 1}).but(hooks=(hook,))
    records, said = ended(made, folder=tmp_path)
    found = [r for r in records if isinstance(r, FindingRecord) and r.role == "weight"]
    assert found[-1].what == "weights not finite"
    assert "2 of 9 weights are not finite, the first rise.weight" in said
    assert not (tmp_path / "model.safetensors").exists()
    # What was good made no room for what is not.
    good = tmp_path / "checkpoints" / "step-000004"
    assert [p.name for p in checkpoints(tmp_path / "checkpoints")] == [
        f"step-00000{n}" for n in (4, 8)
    ]
    assert f"{good} is the newest checkpoint with finite weights" in said
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    assert ended(ready(steps=8), folder=tmp_path, resume=state)[1] == said


def test_checkpoints_of_weights_that_are_not_finite_do_not_fill_the_disk(ready, tmp_path):
    saved = {"every": 2, "keep": 2}

    def left():
        return [int(path.name[-6:]) for path in checkpoints(tmp_path / "checkpoints")]

    made = ready(steps=12, checkpoint=saved).but(hooks=(overflowing_from(7),))
    ended(made, folder=tmp_path)
    assert left() == [4, 6, 12]
    # Since when they are bad is known after a resume too.
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    said = ended(ready(steps=40, checkpoint=saved), folder=tmp_path, resume=state)[1]
    assert left() == [4, 6, 40]
    assert "step-000006 is the newest checkpoint with finite weights" in said


def test_weights_that_are_finite_again_are_kept_as_any_others(ready, tmp_path):
    def spoil_and_heal(prepared, applied):
        done = prepared.steps_attempted
        if done in (5, 6):
            weight = prepared.model.rise.weight
            weight.view(-1)[0] = math.inf if done == 5 else 0.5

    hook = Hook(name="spoil", after_step=spoil_and_heal)
    made = ready(steps=8, checkpoint={"every": 1, "keep": 2}).but(hooks=(hook,))
    list(train_loop(made.prepared, made.task, made.recipe, folder=tmp_path))
    assert [p.name[-1] for p in checkpoints(tmp_path / "checkpoints")] == ["7", "8"]


def test_an_evaluation_that_shows_nothing_does_not_hide_infinite_weights(ready):
    made = ready(steps=3).but(evaluate=lambda model: {"error": 0.5}, hooks=(overflowing_from(3),))
    assert "1 of 9 weights are not finite, the first rise.weight" in ended(made)[1]


def test_without_a_finite_checkpoint_none_is_named(ready, tmp_path):
    made = ready(steps=2).but(hooks=(overflowing_from(1),))
    assert "no checkpoint has finite weights" in ended(made, folder=tmp_path)[1]


def test_averages_count_as_weights(ready, tmp_path):
    made = ready(steps=4, ema={"decay": 0.9}, checkpoint={"every": 1, "keep": 1})

    def spoil(prepared, applied):
        if prepared.steps_attempted == 3:
            prepared.engine.weights.average.averages[1][0] = math.nan

    made = made.but(hooks=(Hook(name="spoil", after_step=spoil),))
    said = ended(made, folder=tmp_path)[1]
    assert "the averages of 1 of 9 weights are not finite, the first that of rise.bias" in said
    assert "step-000002 is the newest checkpoint with finite weights" in said


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16, params=bf16, master=split"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_in_a_weight_is_seen(ready, policy, bad):
    made = ready(policy)
    assert bad_weights(made.prepared) == ""
    with torch.no_grad():
        made.task.model.fall.weight[0, 7] = bad
    assert bad_weights(made.prepared) == "1 of 9 weights are not finite, the first fall.weight"


def test_large_weights_are_finite(ready):
    made = ready()
    with torch.no_grad():
        made.task.model.fall.weight.fill_(3e38)  # whose square is not
    assert bad_weights(made.prepared) == ""


def test_a_run_that_never_applied_a_step_has_diverged(ready):
    made = ready(steps=3).but(loss=with_loss(1))
    assert "none of its 3 steps was applied" in ended(made)[1]


def test_a_run_whose_last_ten_steps_were_skipped_has_diverged(ready, tmp_path):
    made = ready(steps=12).but(loss=with_loss(3))
    said = ended(made, folder=tmp_path)[1]
    assert "the last 10 of its 12 steps were skipped. In step 3 the loss became NaN" in said
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    assert ended(ready(steps=12), folder=tmp_path, resume=state)[1] == said


def test_a_run_whose_last_nine_steps_were_skipped_is_done(ready, tmp_path):
    made = ready(steps=11).but(loss=with_loss(3))
    list(train_loop(made.prepared, made.task, made.recipe, folder=tmp_path))
    assert (tmp_path / "model.safetensors").exists()


def test_a_metric_beside_the_headline_may_be_undefined(ready):
    info = TaskInfo(metrics=(Metric(name="error"), Metric(name="correlation", better="higher")))
    made = ready(steps=2).but(
        info=info, evaluate=lambda model: {"error": 0.5, "correlation": math.nan}
    )
    records = list(train_loop(made.prepared, made.task, made.recipe))
    found = [r for r in records if isinstance(r, FindingRecord)]
    assert [r.what for r in found] == ["evaluation not finite"]
    assert "correlation is nan" in found[0].why
