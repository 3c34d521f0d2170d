import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.precision.plan.phases import PHASES
from narrowcast.strategies.hybrid.control.metrics import (
    Diverged,
    JumpVerified,
    MicroCorrected,
    StepDone,
    TrainingStatistics,
    step_equivalents,
)
from narrowcast.strategies.hybrid.control.recovery import Level


def step(phase="full", loss=2.0, **more):
    usual = {"precision": "fp32", "backward": phase in ("warmup", "full")}
    return StepDone(phase=phase, loss=loss, **{**usual, **more})


def folded(*events, **settings):
    statistics = TrainingStatistics(**settings)
    for event in events:
        statistics = statistics.after(event)
    return statistics


RUN = folded(
    *[step("warmup", 4.0)] * 2,
    *[step("full", 3.0)] * 4,
    *[step("predict", 2.5, precision="bf16", forwards=1, confidence=0.9)] * 3,
    step("correct", 2.6, forwards=2, prediction_error=0.25),
    JumpVerified(length=3, accepted=True, score=0.9),
    JumpVerified(length=5, accepted=False, score=0.9),
    Diverged(level=Level.WARNING),
    Diverged(level=Level.WARNING),
    Diverged(level=Level.CRITICAL),
    MicroCorrected(),
    target_loss=2.5,
)


def test_steps_are_counted_by_phase_and_by_precision():
    assert RUN.steps_by_phase == {"warmup": 2, "full": 4, "predict": 3, "correct": 1}
    assert RUN.steps_by_precision == {"fp32": 7, "bf16": 3}
    assert RUN.total_steps == 10


def test_four_steps_of_ten_without_a_backward_pass_are_forty_percent():
    assert RUN.backward_reduction_pct == pytest.approx(40.0)


def test_five_forwards_cost_five_thirds_of_a_step():
    assert RUN.step_equivalents == pytest.approx(6 + 5 / 3)
    assert RUN.forward_equivalents == 23
    assert step_equivalents(gradient_steps=1, forwards=1) == pytest.approx(4 / 3)


def test_a_forward_of_every_step_bounds_the_saving_at_three():
    all_predicted = folded(*[step("predict", forwards=1)] * 30)
    assert all_predicted.total_steps / all_predicted.step_equivalents == pytest.approx(3)


def test_jumps_are_counted_with_their_length_and_acceptance():
    assert (RUN.acceptance, RUN.average_predict_length) == (0.5, 4.0)
    assert RUN.calibration.trials == 2


def test_losses_confidence_and_accuracy_are_told():
    assert (RUN.final_loss, RUN.best_loss) == (2.6, 2.5)
    assert RUN.average_confidence == pytest.approx(0.9)
    assert RUN.prediction_accuracy == 0.75
    assert RUN.loss_gap_pct(2.5) == pytest.approx(4.0)


def test_divergence_and_micro_corrections_are_counted():
    assert RUN.divergence_events == {"warning": 2, "critical": 1}
    assert RUN.micro_corrections == 1


def test_the_target_is_reached_once_at_what_it_cost():
    assert RUN.target_reached_at == pytest.approx(6 + 1 / 3)
    assert folded(step(loss=2.0)).target_reached_at is None


def test_a_loss_that_is_not_finite_is_neither_the_best_nor_the_last():
    bad = folded(step(loss=3.0), step(loss=math.nan), step(loss=-math.inf))
    assert (bad.final_loss, bad.best_loss, bad.total_steps) == (3.0, 3.0, 3)


def test_of_an_empty_run_nothing_is_claimed():
    empty = TrainingStatistics()
    assert empty.backward_reduction_pct == 0.0
    assert [
        empty.acceptance,
        empty.average_predict_length,
        empty.average_confidence,
        empty.prediction_accuracy,
        empty.loss_gap_pct(1.0),
    ] == [None] * 5
    assert RUN.loss_gap_pct(0.0) is None


def test_everything_is_told_as_json():
    told = json.loads(json.dumps(RUN.to_json(reference_loss=2.5), allow_nan=False))
    assert told["derived"]["loss_gap_pct"] == pytest.approx(4.0)
    assert told["derived"]["step_equivalents"] == pytest.approx(23 / 3)
    assert [row["trials"] for row in told["derived"]["reliability"]] == [1, 1]
    assert told["steps_by_precision"] == {"fp32": 7, "bf16": 3}


events = st.one_of(
    st.builds(
        StepDone,
        phase=st.sampled_from(PHASES),
        loss=st.floats(),
        precision=st.sampled_from(["fp32", "bf16"]),
        backward=st.booleans(),
        forwards=st.integers(0, 5),
        confidence=st.none() | st.floats(0, 1),
    ),
    st.builds(
        JumpVerified, length=st.integers(1, 80), accepted=st.booleans(), score=st.floats(0, 1)
    ),
    st.builds(Diverged, level=st.sampled_from(Level)),
    st.just(MicroCorrected()),
)


@given(st.lists(events, max_size=30))
def test_statistics_come_back_from_json(history):
    statistics = folded(*history)
    told = json.loads(json.dumps(statistics.to_json(), allow_nan=False))
    assert TrainingStatistics.from_json(told) == statistics
