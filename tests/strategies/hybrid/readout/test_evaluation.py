"""An evaluation chooses on a few held-out batches, and measures what is chosen on all of them."""

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.runs import EvalRecord, StrategyRecord, same_trajectory
from narrowcast.runs.records import StepRecord

SMALL = [
    "steps=30", "eval.every=10", "checkpoint.every=5", "precision.policy=fp32", "health.every=0",
    "batch_size=2", "data.eval_windows=48", "data.length=16", "model.layers=1", "model.width=16",
    "model.heads=2", "strategy=hybrid", "strategy.readout.half_lives=[0.1,0.5]",
]  # fmt: skip
PARTS = 24


def told(records):
    return [r for r in records if isinstance(r, StrategyRecord) and r.event == "readout"]


def counted(words):
    """Train, and return the records with how often the model was passed in each evaluation."""
    run = nc.train("quickstart", [*SMALL, *words])
    passes, seen = [], 0

    def count(module, inputs, output):
        nonlocal seen
        seen += not module.training

    run.model.register_forward_hook(count)
    records = []
    for record in run:
        records.append(record)
        if isinstance(record, EvalRecord):
            passes.append(seen)
            seen = 0
    return run, records, passes


def test_one_read_out_is_evaluated_in_full_and_a_share_of_the_run_goes_to_choosing():
    run, records, passes = counted(["strategy.readout.budget=0.2"])
    # A fifth of 3 passes a step, half of it before the end: 3, 3 more, and the other 12.
    assert passes == [PARTS + 3, PARTS + 3, PARTS + 12]
    final = told(records)[-1]
    assert "on 4 of 24 held-out batches, then evaluated on all" in final.why
    judged = [r for r in records if isinstance(r, EvalRecord)][-1]
    assert final.values[final.what] == min(final.values.values()) == judged.metrics["loss"]
    # The model has these weights in the end, and so the same loss on all of the data.
    with torch.no_grad(), run.prepared.autocast():
        again = run.task.evaluate(run.model.eval())
    assert again["loss"] == pytest.approx(judged.metrics["loss"], rel=1e-6)


def test_a_budget_too_small_for_anything_looks_at_one_batch_with_each():
    _, records, passes = counted(["strategy.readout.budget=0.001"])
    assert passes == [PARTS + 3] * 3
    assert all("on 1 of 24" in record.why for record in told(records))


def test_looks_beyond_the_budget_leave_the_last_choice_its_half():
    _, records, passes = counted(["strategy.readout.budget=0.2", "eval.every=3"])
    # Of 18 passes, nine evaluations use up 8.1, and take 27; 9.9 are left.
    assert passes == [PARTS + 3] * 9 + [PARTS + 9]
    assert "on 3 of 24" in told(records)[-1].why


def test_all_are_evaluated_in_full_where_the_budget_pays_for_it():
    _, records, passes = counted(["strategy.readout.budget=1", "data.eval_windows=8"])
    assert passes == [3 * 4] * 3
    assert all(record.why == "best loss of 3 candidates" for record in told(records))


def test_few_parts_are_not_looked_at_twice_where_that_costs_more():
    _, _, passes = counted(["strategy.readout.budget=0.001", "data.eval_windows=2"])
    assert passes == [3] * 3


def test_a_run_that_chooses_on_a_few_batches_is_continued_bit_for_bit(tmp_path):
    words = [*SMALL, "strategy.readout.budget=0.2"]
    with nc.train("quickstart", words, out=tmp_path / "straight") as run:
        straight = list(run)
    with nc.train("quickstart", words, out=tmp_path / "left") as run:
        for record in run:
            if isinstance(record, StepRecord) and record.step == 18:
                break
    with nc.resume(tmp_path / "left") as run:
        resumed = list(run)
    expected = [r for r in straight if getattr(r, "step", 0) > 15]
    assert [r.why for r in told(resumed)] == [r.why for r in told(expected)]
    assert all(map(same_trajectory, told(expected), told(resumed)))
    a, b = (tmp_path / name / "model.safetensors" for name in ("straight", "left"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(("budget", "answer"), [("0", "above 0"), ("1.5", "1"), ("-1", "above 0")])
def test_a_budget_that_is_no_share_is_refused(budget, answer):
    with pytest.raises(ConfigError, match=rf"strategy\.readout\.budget.*{answer}"):
        nc.load_recipe("quickstart", ["strategy=hybrid", f"strategy.readout.budget={budget}"])


def test_a_budget_is_refused_where_the_task_gives_no_parts():
    words = ["steps=10", "precision.policy=fp32", "strategy=hybrid", "strategy.readout.budget=0.1"]
    with pytest.raises(ConfigError, match="evaluates every average in full"):
        nc.train("tutorial", words)
