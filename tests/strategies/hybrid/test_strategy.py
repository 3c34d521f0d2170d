"""Hybrid training through the trainer: phases, read-outs, jumps, and that it is resumed."""

import dataclasses
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.runs import (
    CheckpointRecord,
    EvalRecord,
    FindingRecord,
    HealthRecord,
    PrecisionRecord,
    RunFolder,
    StepRecord,
    StrategyRecord,
    same_trajectory,
)
from narrowcast.training.checkpoints.verify import difference_between

SHORT = ["steps=24", "eval.every=8", "checkpoint.every=5", "precision.policy=fp32", "batch_size=16"]
JUMPS = [
    "strategy.preset=aggressive", "strategy.jumps.budget=1.0", "strategy.phases.warmup_steps=4",
    "strategy.phases.full_steps=6", "strategy.phases.max_predict_steps=4", "steps=32",
]  # fmt: skip
WAYS = {
    "conservative": ["strategy=hybrid", "strategy.preset=conservative"],
    "balanced": ["strategy=hybrid", "strategy.phases.warmup_steps=6"],
    "bf16 leads": ["strategy=hybrid", "strategy.lookahead.storage=bf16"],
    "jumps": ["strategy=hybrid", *JUMPS],
    "jumps between accumulated steps": ["strategy=hybrid", *JUMPS, "gradient_accumulation_steps=2"],
    "jumps that are corrected": ["strategy=hybrid", *JUMPS, "optimizer.lr=0.3"],
    "phases in other formats": ["strategy=hybrid", *JUMPS, "strategy.precision=aggressive"],
    "predictions in bf16": ["strategy=hybrid", *JUMPS, "strategy.precision=recommended"],
}  # fmt: skip


def events(records, event):
    return [r for r in records if isinstance(r, StrategyRecord) and r.event == event]


def weights(run):
    return {name: w.clone() for name, w in run.prepared.fp32_state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_strategy_that_is_switched_off_leaves_the_plain_run_bit_for_bit():
    plain, off = (
        nc.train("tutorial", SHORT),
        nc.train("tutorial", [*SHORT, "strategy=hybrid", "strategy.enabled=false"]),
    )
    assert all(map(same_trajectory, list(plain), list(off)))
    assert equal(weights(plain), weights(off))


CASES = [
    *((way, left_at) for way in WAYS for left_at in (9, 18)),
    ("balanced", 3),
    ("jumps that are corrected", 23),
    ("predictions in bf16", 13),
]


@pytest.mark.parametrize(("way", "left_at"), CASES)
def test_a_hybrid_run_that_is_left_is_continued_bit_for_bit(way, left_at, tmp_path):
    words = [*SHORT, *WAYS[way]]
    with nc.train("tutorial", words, out=tmp_path / "straight") as run:
        list(run)
    with nc.train("tutorial", words, out=tmp_path / "left") as run:
        for record in run:
            if isinstance(record, StepRecord) and record.step == left_at:
                break
    with nc.resume(tmp_path / "left") as run:
        assert (run.resumed_from or 0) == left_at // 5 * 5
        list(run)
    assert difference_between(tmp_path / "straight", tmp_path / "left") is None


def test_records_of_a_resumed_run_with_background_checkpoints_are_those_of_the_straight_run(
    tmp_path,
):
    words = [*SHORT, *WAYS["jumps"], "checkpoint.background=true", "checkpoint.keep=9"]
    with nc.train("tutorial", words, out=tmp_path / "run") as run:
        straight = list(run)
    for step in (15, 20, 25, 30, 32):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:06}")
    with nc.resume(tmp_path / "run") as run:
        assert run.resumed_from == 10  # the checkpoint before predict, recorded after it
        list(run)
    with RunFolder.open(tmp_path / "run") as folder:
        resumed = folder.records()
    # When a checkpoint is recorded depends on how long a thread took to write it.
    a, b = ([r for r in rs if not isinstance(r, CheckpointRecord)] for rs in (straight, resumed))
    assert len(a) == len(b)
    assert all(map(same_trajectory, a, b))


def test_what_is_returned_is_the_read_out_that_was_measured_best():
    run = nc.train(
        "quickstart",
        [
            "steps=30",
            "eval.every=30",
            "precision.policy=fp32",
            "health.every=0",
            "batch_size=4",
            "data.eval_windows=8",
            "strategy=hybrid",
            "strategy.readout.half_lives=[0.1,0.5]",
        ],
    )
    records = list(run)  # fmt: skip
    (choice,) = events(records, "readout")
    (judged,) = [r for r in records if isinstance(r, EvalRecord)]
    assert set(choice.values) == {"trained", "average 0.1", "average 0.5"}
    assert choice.values[choice.what] == min(choice.values.values()) == judged.metrics["loss"]
    # The model has these weights in the end, and so the same loss.
    with torch.no_grad(), run.prepared.autocast():
        again = run.task.evaluate(run.model.eval())
    assert again["loss"] == pytest.approx(judged.metrics["loss"], rel=1e-6)


def test_the_point_ahead_begins_after_a_warm_up_that_is_asked_for_and_takes_the_momentum():
    words = [*SHORT, "strategy=hybrid", "strategy.phases.warmup_steps=6"]
    plain, run = (
        nc.train("tutorial", [*SHORT, "lr_schedule.name=constant"]),
        nc.train("tutorial", [*words, "lr_schedule.name=constant"]),
    )
    expected = [r.loss for r in plain if isinstance(r, StepRecord)]
    found = []
    for record in run:
        if isinstance(record, StepRecord):
            found.append(record.loss)
            betas = [group["betas"][0] for group in run.prepared.optimizer.param_groups]
            assert set(betas) == ({0.9} if record.step <= 6 else {0.0})
    assert found[:7] == expected[:7]
    assert found[8:] != expected[8:]


def test_phases_have_the_formats_that_they_are_given():
    words = [*SHORT, "strategy=hybrid", *JUMPS, "strategy.policies.predict=bf16",
             "strategy.policies.correct=fp16", "optimizer.lr=0.3"]  # fmt: skip
    records = list(nc.train("tutorial", words))
    changes = [r for r in records if isinstance(r, PrecisionRecord)]
    expected = [(11, "bf16"), (19, "fp16"), (27, "fp32")]
    assert [(r.step, r.after.removeprefix("compute=")) for r in changes] == expected
    phases = {r.step: r.phase for r in events(records, "phase")}
    assert phases == {0: "warmup", 4: "full", 10: "predict", 18: "correct", 26: "full"}


def test_steps_of_predict_and_correct_have_no_backward_pass_and_move_no_weight():
    run = nc.train("tutorial", [*SHORT, "strategy=hybrid", *JUMPS, "optimizer.lr=0.3",
                                "health.every=1", "lr_schedule.name=linear"])  # fmt: skip
    steps, before, rates = {}, None, []
    for record in run:
        if isinstance(record, StepRecord):
            now = weights(run)
            if record.forward_only:
                assert equal(now, before)
                assert all(w.grad is None for w in run.model.parameters())
                assert record.applied
                assert record.grad_norm != record.grad_norm
            steps[record.step], before = record.forward_only, now
            rates.append(record.lr)
        if isinstance(record, HealthRecord) and steps[record.step]:
            assert set(record.role) <= {"input", "output"}
        assert not isinstance(record, FindingRecord) or not steps.get(record.step)
    assert [step for step, forward in steps.items() if forward] == [*range(11, 27)]
    assert rates[12:27] == sorted(rates[12:27], reverse=True)  # the schedule goes on
    assert len(set(rates[12:27])) == 15


def test_a_nonfinite_loss_of_a_forward_only_step_is_skipped_and_rejects_the_prediction():
    run = nc.train("tutorial", [*SHORT, "strategy=hybrid", *JUMPS])
    records = []
    for record in run:
        records.append(record)
        if isinstance(record, StepRecord) and record.step == 11:
            run.model.hidden.register_forward_hook(lambda *parts: parts[-1] * math.nan)
            last = weights(run)
        if isinstance(record, StepRecord) and record.step == 18:
            break
    steps = {r.step: r for r in records if isinstance(r, StepRecord)}
    assert steps[11].applied
    assert not any(steps[step].applied for step in range(12, 19))
    assert "nan" in steps[12].skip_reason.lower() or "finite" in steps[12].skip_reason
    assert equal(weights(run), last)
    strategy = run._assembled.strategy
    (jump, *_) = events(strategy.act(18, batches=18), "jump")
    assert jump.why == "a loss is not finite"


def test_a_divergence_is_recorded_and_doubles_the_steps_before_the_next_jump():
    run = nc.train("tutorial", [*SHORT, "strategy=hybrid", *JUMPS, "steps=60"])
    first = next(record for record in run if isinstance(record, StepRecord))
    strategy = run._assembled.strategy
    records = []
    for step in range(2, 47):
        loss = 2 + 0.1 * (step % 3) if step < 39 else 50.0
        strategy.note(dataclasses.replace(first, step=step, loss=loss))
        if strategy.is_due(step):
            records += strategy.act(step, batches=step)
    (diverged,) = [r for r in events(records, "phase") if "standard deviations" in r.why]
    assert diverged.step == 40
    assert diverged.values["steps"] == 12


def test_records_around_jumps_are_in_the_order_of_their_steps():
    words = [*SHORT, "strategy=hybrid", *JUMPS, "strategy.precision=aggressive"]
    records = list(nc.train("tutorial", words))
    steps = [r.step for r in records]
    assert events(records, "jump")
    assert steps == sorted(steps)
    begins = [r.step for r in events(records, "phase") if r.step]
    formats = [r.step for r in records if isinstance(r, PrecisionRecord)]
    assert formats == [step + 1 for step in begins]


def test_rejected_jumps_stay_within_their_share_of_the_work():
    words = ["steps=60", "precision.policy=fp32", "strategy=hybrid",
             "strategy.preset=aggressive", "strategy.jumps.budget=0.4"]  # fmt: skip
    records = list(nc.train("tutorial", words))
    jumps = events(records, "jump")
    spent = sum(r.values["forward passes"] for r in jumps)
    wasted = sum(r.values["forward passes"] for r in jumps if not r.values["accepted"])
    assert spent > 0
    assert wasted <= 0.4 * 60 * 3
    (summary,) = events(records, "summary")
    trained = summary.values["steps in warmup"] + summary.values["steps in full"]
    assert trained == sum(not r.forward_only for r in records if isinstance(r, StepRecord)) < 60
    assert summary.values["step equivalents"] == pytest.approx(trained + spent / 3)


@pytest.mark.parametrize("left_at", [3, 24])
def test_a_hybrid_run_can_be_given_more_steps(left_at, tmp_path):
    words = [*SHORT, "strategy=hybrid", "checkpoint.every=1"]
    with nc.train("tutorial", words, out=tmp_path / "run") as run:
        for record in run:
            if isinstance(record, StepRecord) and record.step == left_at + 1:
                break
    with nc.resume(tmp_path / "run", ["steps=48"]) as run:
        records = list(run)
    assert [r.step for r in records if isinstance(r, StepRecord)][-1] == 48
    full = [r.step for r in events(records, "phase") if r.phase == "full"]
    assert full == ([16] if left_at == 3 else [])


def test_the_best_evaluation_keeps_the_answer(tmp_path):
    words = [*SHORT, "strategy=hybrid", "eval.keep_best=true"]
    with nc.train("tutorial", words, out=tmp_path / "run") as run:
        list(run)
        returned = weights(run)
    assert equal(load_file(tmp_path / "run/model.safetensors"), returned)


def test_the_report_tells_of_phases_read_outs_and_the_plain_run(tmp_path):
    words = [*SHORT, "strategy=hybrid", "strategy.baseline=true"]
    with nc.train("tutorial", words, out=tmp_path / "run") as run:
        records = list(run)
    told = events(records, "baseline")
    assert [r.values["step"] for r in told] == [8, 16, 24]
    page = (tmp_path / "run/report.html").read_text()
    for words in ("Hybrid training", "Candidate weights", "Against plain training", "In numbers"):
        assert words in page
    assert "Lookahead point" in page  # in the table of memory
    assert all("do not occur" in r.why for r in events(records, "phase"))
    plain = nc.train("tutorial", SHORT)
    metrics = [r.metrics for r in plain if isinstance(r, EvalRecord)]
    assert [r.values["accuracy"] for r in told] == [m["accuracy"] for m in metrics]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["strategy.preset=aggressive"], "Write strategy=hybrid too"),
        (["strategy=hybrid", "ema.decay=0.9"], "has its own averages"),
        (["strategy=hybrid", "strategy.phases.warmup_steps=200"], "Write at most 199"),
        (["strategy=hybrid", "strategy.jumps.budget=0"], "must be above 0"),
        (["strategy=hybrid", "strategy.jumps.micro_batches=9"], "strategy.preset=aggressive too"),
        (["strategy=hybrid", "strategy.jumps.predictor=line"], "predictor=line: no such setting"),
        (["strategy=hybrid", "strategy.jumps.history_on=cpu"], "history_on=cpu: no such setting"),
        (["strategy=hybrid", "strategy.preset=conservative", "strategy.lookahead.rate=0.1"],
         "strategy.lookahead.enabled=true too"),
        (["strategy=hybrid", "strategy.precision=recommended",
          "precision.schedule=[{policy: fp32, until: 50%}, {policy: bf16}]"],
         "sets a policy per phase already"),
        (["strategy=hybird"], "Did you mean hybrid"),
        *((["strategy=hybrid", f"strategy.{key}"], "strategy.preset=aggressive too")
          for key in ("phases.full_steps=9", "phases.max_predict_steps=9",
                      "phases.confidence_threshold=0.5", "phases.divergence_sigma=2",
                      "policies.predict=bf16", "policies.correct=bf16")),
        (["strategy=hybrid", "strategy.preset=conservative", "strategy.phases.warmup_steps=9"],
         "warmup_steps has no effect"),
        (["strategy=hybrid", "strategy.readout.half_lives=[]", "strategy.readout.every=9"],
         "needs at least one average"),
        (["strategy=hybrid", "strategy.readout.every=201"], "Write at most 200"),
        (["strategy=hybrid", "lr_schedule.name=constant", "strategy.lr_horizon=2"],
         "no effect on a constant learning rate"),
        (["precision.adapt.cooldown=9"], "adapt.enabled=true too"),
        (["profile.first=9"], "profile.steps=5 too"),
        (["profile.first=201", "profile.steps=2"], "step 201 is after the last"),
    ],
)  # fmt: skip
def test_settings_that_nothing_would_heed_are_refused(words, answer):
    with pytest.raises(ConfigError, match=answer):
        nc.load_recipe("tutorial", words)


def test_a_name_alone_asks_for_a_strategy(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("workload: tutorial\nsteps: 10\nbatch_size: 8\nstrategy: hybrid\n")
    assert nc.load_recipe(file).recipe.strategy.is_hybrid
    assert not nc.load_recipe(file, ["strategy.enabled=false"]).recipe.strategy.is_hybrid


AGGRESSIVE = ["strategy=hybrid", "strategy.preset=aggressive", "precision.policy=fp32"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_aggressive_run_whose_budget_allows_no_jump_names_one_that_does(accumulate):
    words = [*AGGRESSIVE, "steps=120", "batch_size=8", f"gradient_accumulation_steps={accumulate}"]
    with pytest.raises(ConfigError, match="cannot try a jump") as raised:
        nc.train("tutorial", words)
    (enough,) = re.findall(r"strategy\.jumps\.budget=[\d.]+ or more", str(raised.value))
    records = list(nc.train("tutorial", [*words, enough.removesuffix(" or more")]))
    assert any(record.values["horizon"] for record in events(records, "jump"))


def test_an_aggressive_run_that_ends_before_the_first_jump_raises():
    with pytest.raises(ConfigError, match="before step 21, which takes 8 steps, got steps=20"):
        nc.train("tutorial", [*AGGRESSIVE, "steps=20", "strategy.jumps.budget=1"])
