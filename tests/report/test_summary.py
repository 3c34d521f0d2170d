import math
from dataclasses import replace

import pytest

from narrowcast.report.summary import ending, facts, headline
from narrowcast.runs import CheckpointRecord, EvalRecord, FindingRecord, Metric, TaskInfo


def checkpoint(step):
    return CheckpointRecord(step=step, seconds_blocked=0.0, seconds_total=0.0, bytes=1)


def test_a_run_with_all_its_steps_is_finished(run_data_of, step):
    found = ending(run_data_of([step(n) for n in (1, 2, 3)], steps=3))
    assert (found.label, found.tone, found.advice) == ("Finished", "good", "")


def judged(run_data_of, step, values, **settings):
    """A run evaluated after every step of which 10 were asked for."""
    records = []
    for n, value in enumerate(values, start=1):
        records += [step(n), EvalRecord(step=n, metrics={"loss": value})]
    return run_data_of(records, steps=10, **settings)


def test_a_run_that_stopped_improving_is_finished_and_says_why(run_data_of, step):
    settings = {"eval.patience": 2}
    data = judged(run_data_of, step, [3.0, 2.0, 2.5, 2.0], **settings)
    found = ending(data)
    assert (found.label, found.tone) == ("Finished", "good")
    told = "The run ended early at step 4 of 10: loss had not improved for 2 evaluations."
    assert found.advice == told
    assert "for 4 of 10 steps" in headline(data)


def test_a_run_that_ends_with_its_best_weights_says_of_which_step(run_data_of, step):
    settings = {"eval.keep_best": True, "eval.patience": 2}
    found = ending(judged(run_data_of, step, [3.0, 2.0, 2.5, 2.25], **settings))
    assert found.label == "Finished"
    assert found.advice.endswith("weights are those of step 2, the best evaluation: loss 2.000.")


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ([3.0, 2.0, 2.5, 2.0], {}),
        ([3.0, 2.0, 2.5, 2.0], {"eval.patience": 3}),
        ([3.0, 2.0, 2.5, 1.9], {"eval.patience": 2}),
    ],
)
def test_a_run_that_was_cut_off_has_not_ended_early(run_data_of, step, values, settings):
    assert ending(judged(run_data_of, step, values, **settings)).label == "Unfinished"


def test_a_run_that_ended_early_with_numbers_that_are_none_has_diverged(run_data_of, step):
    data = judged(run_data_of, step, [math.nan] * 2, **{"eval.patience": 2})
    assert ending(data).label == "Diverged"


def test_a_run_without_steps_says_so(run_data_of):
    data = run_data_of([], steps=100)
    assert ending(data).label == "No step yet"
    assert headline(data) == "quickstart is set up to train in fp16 and has not run a step."
    assert facts(data) == []


def test_a_run_cut_off_names_the_checkpoint_it_can_resume_from(run_data_of, step):
    records = [step(1), step(2), checkpoint(2), step(3)]
    found = ending(run_data_of(records, steps=10))
    assert found.label == "Unfinished"
    assert "after 3 of 10 steps" in found.advice
    assert "from the checkpoint at step 2." in found.advice


def test_a_run_cut_off_before_its_first_checkpoint_does_not_promise_a_resume(run_data_of, step):
    found = ending(run_data_of([step(1)], steps=10))
    assert "There is no checkpoint to resume from." in found.advice


def test_a_run_that_saved_its_last_step_was_stopped(run_data_of, step):
    found = ending(run_data_of([step(1), step(2), checkpoint(2)], steps=10))
    assert found.label == "Stopped"
    assert "`narrowcast resume` continues it from there" in found.advice


def test_a_run_that_ends_on_as_many_skips_as_allowed_has_diverged(run_data_of, step):
    skips = [step(n, applied=False, skip_reason="inf in head", loss_scale=1.0) for n in range(2, 7)]
    finding = FindingRecord(
        step=6, since=6, module="head", role="output", what="", why="", action="", advice=""
    )
    data = run_data_of([step(1), *skips, finding], steps=10, **{PATIENCE: 5})
    found = ending(data)
    assert (found.label, found.tone) == ("Diverged", "bad")
    assert "The last 5 steps were all skipped" in found.advice
    assert "inf in head" in found.advice
    assert "Look at head first." in found.advice


def test_fewer_skips_than_allowed_are_not_a_divergence(run_data_of, step):
    skips = [step(n, applied=False, skip_reason="inf") for n in range(2, 6)]
    assert ending(run_data_of([step(1), *skips], steps=10, **{PATIENCE: 5})).label == "Unfinished"


def test_a_run_whose_scale_still_falls_has_not_given_up(run_data_of, step):
    skips = [step(n, applied=False, skip_reason="inf", loss_scale=2.0**-n) for n in range(2, 60)]
    assert ending(run_data_of([step(1), *skips], steps=99, **{PATIENCE: 5})).label == "Unfinished"


@pytest.mark.parametrize(
    ("policy", "how", "said"),
    [
        ("fp16", "native", "in fp16"),
        ("fp8-row", "emulated", "in fp8-row (emulated)"),
        ("default", "native", "with the default policy, mostly fp16"),
        ("compute=fp16; head: bf16", "native", "with policy compute=fp16; head: bf16, mostly fp16"),
    ],
)
def test_the_headline_names_the_policy_and_whether_it_is_emulated(
    policy, how, said, run_data_of, step, module, plan_of
):
    data = run_data_of([step(1)], steps=1, **{"precision.policy": policy})
    data = replace(data, plan=plan_of([module("a", how=how)]))
    assert headline(data).startswith(f"quickstart trained {said} for 1 step:")


def test_a_loss_that_is_not_finite_to_the_end_is_told_with_the_step_it_began(run_data_of, step):
    losses = [2.0, math.nan, 2.0, math.inf, math.nan]
    data = run_data_of([step(n, loss=loss) for n, loss in enumerate(losses, 1)], steps=5)
    assert ending(data).label == "Loss not finite"
    assert "since step 4." in ending(data).advice
    assert "training loss 2.000 → 2.000, not finite from step 4 on" in headline(data)


def test_a_loss_that_was_never_finite_is_told(run_data_of, step):
    data = run_data_of([step(1, loss=math.nan)], steps=1)
    assert headline(data) == (
        "quickstart trained in fp16 for 1 step: training loss never finite, never evaluated."
    )


BEGAN = "the training loss was 5.500 at the first step"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([3.0, 2.0], f"evaluated loss fell from 3.000 at step 1 to 2.000; {BEGAN}"),
        ([2.0, 3.0], f"evaluated loss rose from 2.000 at step 1 to 3.000; {BEGAN}"),
        ([2.0, 2.0], f"evaluated loss 2.000 at step 1 and at the end; {BEGAN}"),
        ([2.5], "evaluated loss 2.500 at step 1"),
    ],
)
def test_the_headline_says_how_the_evaluations_went(metrics, said, run_data_of, step):
    evals = [
        EvalRecord(step=n, metrics={"loss": y, "perplexity": 9.0}) for n, y in enumerate(metrics, 1)
    ]
    data = run_data_of([step(1, loss=5.5), step(2), *evals], steps=2)
    assert headline(data) == f"quickstart trained in fp16 for 2 steps: {said}."


def test_a_run_that_came_to_nothing_says_so_first(run_data_of, step):
    evals = [EvalRecord(step=n, metrics={"loss": y}) for n, y in ((1, 2.5), (2, math.nan))]
    skipped = step(2, applied=False, skip_reason="inf in head")
    data = run_data_of([step(1), skipped, *evals], steps=2)
    assert (
        headline(data) == "quickstart diverged in fp16 in 2 steps: its last evaluated loss is nan."
    )
    found = ending(data)
    assert (found.label, found.tone) == ("Diverged", "bad")
    assert "the weights are in the last checkpoint" in found.advice
    assert "inf in head" in found.advice
    # A run that is not over may come to something yet.
    going = run_data_of([step(1), skipped, *evals], steps=9)
    assert ending(going).label == "Unfinished"
    assert "not a number at the end" in headline(going)


def test_a_run_with_infinite_weights_says_so_first(run_data_of, step):
    found = FindingRecord(
        step=1,
        since=1,
        module="",
        role="weight",
        what="weights not finite",
        why="1 of 2 weights are not finite, the first head.weight",
        action="",
        advice="",
    )
    data = run_data_of([step(1), EvalRecord(step=1, metrics={"loss": 2.0}), found], steps=1)
    assert "the first head.weight" in headline(data)
    assert "only a checkpoint from before" in ending(data).advice


def test_the_facts_count_skips_tokens_and_time(run_data_of, step):
    records = [step(n, applied=n != 3, items=100, seconds=0.5) for n in range(1, 5)]
    found = {fact.label: (fact.value, fact.note) for fact in facts(run_data_of(records, steps=4))}
    assert found["Steps applied"] == ("3", "1 skipped (25 %)")
    assert found["Tokens per second"] == ("200", "400 tokens in total")
    assert found["Time in steps"] == ("2.0 s", "500 ms per step")
    assert found["Loss scale"] == ("65,536", "throughout")


def test_memory_that_was_not_measured_is_not_a_fact(run_data_of, step):
    labels = {fact.label for fact in facts(run_data_of([step(1, peak_bytes=0)], steps=1))}
    assert "Peak memory" not in labels


PATIENCE = "precision.loss_scale.max_skipped_steps"


def test_the_task_says_what_is_counted_and_how_its_headline_is_written(
    run_data_of, classifier, classifier_course
):
    data = run_data_of(classifier_course, steps=300, task=classifier)
    found = {fact.label: (fact.value, fact.note) for fact in facts(data)}
    assert found["Evaluated accuracy"] == ("80.0%", "loss 2.000")
    assert found["Series per second"][1].endswith("series in total")
    assert "accuracy rose from 60.0% at step 100 to 80.0%; the training loss" in headline(data)


@pytest.mark.parametrize(("better", "best"), [("higher", "0.9000 at step 1"), ("lower", "")])
def test_a_run_that_ends_worse_than_it_was_says_where_it_was_best(better, best, run_data_of, step):
    evals = [EvalRecord(step=n, metrics={"score": y}) for n, y in ((1, 0.9), (2, 0.8))]
    task = TaskInfo(metrics=(Metric(name="score", better=better),))
    (fact, *_) = facts(run_data_of([step(1), step(2), *evals], steps=2, task=task))
    assert fact.note == (f"best {best}" if best else "at step 2")
