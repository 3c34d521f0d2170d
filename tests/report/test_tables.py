import pytest

from narrowcast.report import tables
from narrowcast.runs import EvalRecord, FindingRecord, Metric, TaskInfo


def finding(step, **changes):
    values = {"module": "head", "role": "output", "what": "overflow", "why": "amax"}
    values |= {"action": "", "advice": "", "since": step}
    return FindingRecord(step=step, **{**values, **changes})


def test_reasons_are_counted_with_the_most_frequent_first(run_data_of, step):
    records = [step(n, applied=False, skip_reason="nan" if n == 1 else "inf") for n in range(1, 7)]
    found = [(r.why, r.times, r.steps) for r in tables.reasons(run_data_of(records, steps=6))]
    assert found == [("inf", 5, "2 – 6"), ("nan", 1, "1")]


def test_skips_that_differ_only_in_the_scale_they_left_behind_share_a_row(run_data_of, step):
    whys = ["gradients are not finite; loss scale 4 → 2", "gradients are not finite"]
    records = [step(n, applied=False, skip_reason=why) for n, why in enumerate(whys, 1)]
    found = [(r.why, r.times) for r in tables.reasons(run_data_of(records, steps=2))]
    assert found == [("gradients are not finite", 2)]


def test_a_skip_without_a_reason_is_not_left_out(run_data_of, step):
    (reason,) = tables.reasons(run_data_of([step(1, applied=False)], steps=1))
    assert reason.why == "no reason recorded"


def test_findings_that_say_the_same_are_one_row(run_data_of):
    data = run_data_of([finding(3), finding(9), finding(9, module="embed")], steps=10)
    found = [(f.first.module, f.times, f.steps) for f in tables.findings(data)]
    assert found == [("head", 2, "3, 9"), ("embed", 1, "9")]


def test_the_heaviest_role_comes_first_and_the_shares_are_of_the_sum():
    rows, total = tables.bytes_by_role({"bytes": {"params": 2**20, "moments": 3 * 2**20}})
    assert [(row.role, row.share) for row in rows] == [
        ("Optimizer moments", "75 %"),
        ("Weights", "25 %"),
    ]
    assert total == "4.00 MiB"


@pytest.mark.parametrize("plan", [{}, {"bytes": {}}, {"bytes": {"params": 0}}])
def test_a_plan_without_bytes_has_no_rows(plan):
    assert tables.bytes_by_role(plan)[0] == []


def test_bytes_are_added_up_from_the_modules_where_the_plan_has_no_sum():
    modules = [{"bytes": {"params": 2**20}}, {"bytes": {"params": 2**20, "grads": 2**20}}]
    rows, total = tables.bytes_by_role({"modules": modules})
    assert ([row.size for row in rows], total) == (["2.00 MiB", "1.00 MiB"], "3.00 MiB")


def test_what_somebody_set_is_apart_from_the_defaults(run_data_of):
    chosen, defaults = tables.settings(run_data_of([], steps=7))
    assert ("steps", "7", "command line") in [(s.key, s.value, s.origin) for s in chosen]
    assert {s.origin for s in defaults} == {"default"}
    assert all(s.origin != "default" for s in chosen)


def test_evaluations_with_different_metrics_share_a_table(run_data_of):
    evals = [EvalRecord(step=1, metrics={"loss": 2.0}), EvalRecord(step=2, metrics={"bpb": 1.0})]
    names, rows = tables.eval_table(run_data_of(evals, steps=2))
    assert names == ["loss", "bpb"]
    assert rows == [["1", "2.000", "–"], ["2", "–", "1.000"]]


def test_a_table_of_metrics_begins_with_the_headline_and_says_which_way_is_better(
    run_data_of, classifier
):
    evals = [EvalRecord(step=1, metrics={"loss": 2.0, "ema_accuracy": 0.7, "accuracy": 0.5})]
    data = run_data_of(evals, steps=1, task=classifier)
    assert tables.eval_table(data) == (
        ["accuracy", "loss", "ema_accuracy"],
        [["1", "50.0%", "2.000", "70.0%"]],
    )
    assert tables.directions(data) == (
        "Higher is better for accuracy, ema accuracy; lower is better for loss."
    )


def test_where_lower_is_better_for_all_the_table_need_not_say_so(run_data_of):
    data = run_data_of([EvalRecord(step=1, metrics={"loss": 2.0})], steps=1)
    assert tables.directions(data) == ""


def test_no_direction_is_claimed_for_a_metric_that_is_not_ranked(run_data_of):
    metrics = (Metric(name="right", better="higher"), Metric(name="alive", ranked=False))
    evals = [EvalRecord(step=1, metrics={"right": 1.0, "alive": 5.0})]
    data = run_data_of(evals, steps=1, task=TaskInfo(metrics=metrics))
    assert tables.directions(data) == "Higher is better for right."
