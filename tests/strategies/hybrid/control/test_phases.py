import json
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import RecipeError
from narrowcast.precision.plan.phases import PHASES
from narrowcast.strategies.hybrid.control.phases import (
    ALLOWED,
    TRANSITIONS,
    Correct,
    Full,
    PhaseState,
    Predict,
    Warmup,
    after_divergence,
    after_outcome,
    computes_backward,
    forced,
    next_decision,
    predict_length,
    recovered,
    transition_table,
    uses_predictions,
)
from narrowcast.strategies.hybrid.control.recovery import (
    Abort,
    Continue,
    ForceFullPhase,
    IncreaseConfidenceThreshold,
    Level,
    ReducePredictRatio,
    RollbackAndRetry,
)
from narrowcast.strategies.hybrid.control.settings import PhaseSettings

SMALL = PhaseSettings(warmup_steps=3, full_steps=2, max_predict_steps=4, validation_samples=1)


def walk(settings, steps, *, confidence=0.95, state=None, failing=()):
    """Return the phase of every step and the decisions in their order."""
    state, decisions, phases = state or PhaseState(), [], []
    for step in range(steps):
        before = state
        state = next_decision(state, settings, confidence=confidence, losses=[1.0, 1.0])
        if before.remaining == 0:
            decisions.append(state.decision)
        phases.append(state.phase)
        state = after_outcome(state, settings, succeeded=step not in failing)
    return phases, decisions, state


def test_the_warm_up_ends_after_its_steps_and_a_full_phase_is_forced():
    phases, decisions, _ = walk(SMALL, 6)
    assert phases == ["warmup"] * 3 + ["full"] * 2 + ["predict"]
    assert decisions[:2] == [Warmup(3), Full(2)]


def test_without_a_warm_up_the_first_phase_is_full_however_sure():
    _, decisions, _ = walk(replace(SMALL, warmup_steps=0), 1, confidence=1.0)
    assert decisions == [Full(2)]


def test_a_correction_follows_every_prediction():
    phases, _, _ = walk(SMALL, 60)
    ends = [i for i in range(59) if phases[i] == "predict" and phases[i + 1] != "predict"]
    assert ends
    assert {phases[i + 1] for i in ends} == {"correct"}


def test_five_predictions_in_a_row_and_then_ordinary_training():
    _, decisions, _ = walk(SMALL, 200)
    order = "".join(type(each).__name__[0] for each in decisions)
    assert order.startswith("WF" + "PC" * 5 + "F" + "PC" * 5 + "F")


def test_an_unsure_run_is_trained_as_usual_for_ever():
    phases, _, _ = walk(SMALL, 50, confidence=0.8499)
    assert set(phases[3:]) == {"full"}


def test_a_failed_prediction_ends_at_once_and_full_comes_before_the_next_one():
    phases, _, _ = walk(SMALL, 10, failing={5})
    assert phases[5:] == ["predict", "correct", "full", "full", "predict"]


def test_an_outcome_may_tell_several_steps_at_once():
    _, _, state = walk(SMALL, 5)
    state = next_decision(state, SMALL, confidence=1.0, losses=[])
    assert state.decision == Predict(4, 1.0, None)
    done = after_outcome(state, SMALL, succeeded=True, steps=4)
    assert (done.step, done.remaining) == (9, 0)


@pytest.mark.parametrize("steps", [0, 5])
def test_steps_that_were_not_decided_are_refused(steps):
    state = forced(PhaseState(), Full(4))
    with pytest.raises(RecipeError, match="ask `next_decision` before a step"):
        after_outcome(state, SMALL, succeeded=True, steps=steps)


@pytest.mark.parametrize(
    ("confidence", "consecutive", "length"),
    [
        (1.0, 0, 80),  # the most
        (0.9, 0, 64),  # floor(64.8)
        (0.9, 1, 57),  # 64 * 0.9 = 57.6
        (0.9, 4, 38),  # 64 * 0.6 = 38.4
        (0.9, 9, 32),  # never less than half
        (0.3, 0, 10),  # 7, and so the least
        (0.0, 5, 10),
    ],
)
def test_the_length_of_a_prediction_is_as_written(confidence, consecutive, length):
    settings = PhaseSettings(max_predict_steps=80)
    assert predict_length(settings, confidence=confidence, consecutive=consecutive) == length


@given(
    confidence=st.floats(0, 1),
    consecutive=st.integers(0, 20),
    most=st.integers(1, 200),
)
def test_a_prediction_is_never_longer_than_the_most_nor_shorter_than_the_least(
    confidence, consecutive, most
):
    settings = PhaseSettings(max_predict_steps=most)
    length = predict_length(settings, confidence=confidence, consecutive=consecutive)
    assert min(10, most) <= length <= most


def test_a_prediction_is_given_up_three_deviations_above_the_mean():
    losses = [2.0, 2.5, 3.0, math.nan]
    state = replace(forced(PhaseState(), Full(1)), remaining=0)
    decision = next_decision(state, SMALL, confidence=0.9, losses=losses).decision
    expected = 2.5 + 3 * statistics.pstdev(losses[:3])
    assert decision.fallback_loss == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("level", "action"),
    [
        (Level.NORMAL, Continue()),
        (Level.CAUTION, ReducePredictRatio(0.5)),
        (Level.WARNING, ForceFullPhase(4)),
        (Level.CRITICAL, RollbackAndRetry(7)),
    ],
)
def test_divergence_in_a_prediction_has_the_action_of_its_level(level, action):
    _, _, state = walk(SMALL, 6)
    after, done = after_divergence(state, SMALL, level=level, checkpoint_step=7)
    assert done == action
    assert after.phase == ("full" if level >= Level.WARNING else "predict")
    assert after.remaining == (4 if level >= Level.WARNING else 3)


def test_a_caution_halves_the_next_prediction_and_one_that_succeeds_ends_it():
    _, _, state = walk(SMALL, 5)
    state, _ = after_divergence(state, SMALL, level=Level.CAUTION)
    _, decisions, _ = walk(SMALL, 6, state=state)
    lengths = [each.steps for each in decisions if isinstance(each, Predict)]
    assert lengths == [2, 4]


def test_a_warm_up_is_left_alone_but_a_critical_one_cannot_go_on():
    _, _, state = walk(SMALL, 2)
    assert after_divergence(state, SMALL, level=Level.WARNING) == (state, Continue())
    after, action = after_divergence(state, SMALL, level=Level.CRITICAL)
    assert after == state
    assert isinstance(action, Abort)


def test_a_raised_threshold_stays_raised():
    state = recovered(PhaseState(), IncreaseConfidenceThreshold(0.97))
    state = recovered(state, IncreaseConfidenceThreshold(0.96))
    phases, _, _ = walk(SMALL, 30, state=state, confidence=0.965)
    assert "predict" not in phases


def test_allowed_changes_are_those_of_the_specification():
    assert dict(ALLOWED) == {
        "warmup": {"full"},
        "full": {"full", "predict", "correct"},
        "predict": {"correct", "full"},
        "correct": {"full", "predict"},
    }


@pytest.mark.parametrize("before", PHASES)
@pytest.mark.parametrize("after", [Warmup(1), Full(1), Predict(1, 0.9, None), Correct(1, 0.1)])
def test_a_forced_change_is_refused_exactly_where_the_table_has_no_row(before, after):
    first = {"warmup": Warmup(1), "full": Full(1), "correct": Correct(1, 0.1)}
    state = PhaseState(decision=first.get(before, Predict(1, 0.9, None)))
    if any((row.before, row.after) == (before, after.phase) for row in TRANSITIONS):
        assert forced(state, after).decision == after
    else:
        with pytest.raises(RecipeError, match=f"no phase goes from {before} to {after.phase}"):
            forced(state, after)


def test_a_forced_phase_without_steps_is_refused():
    with pytest.raises(RecipeError, match="write at least 1"):
        forced(PhaseState(), Full(0))


events = st.tuples(st.floats(0, 1), st.booleans(), st.sampled_from(Level))


@given(st.lists(events, max_size=120))
def test_every_change_of_phase_is_in_the_table_and_every_state_comes_back_from_json(history):
    state = PhaseState()
    for confidence, succeeded, level in history:
        before = state
        state = next_decision(state, SMALL, confidence=confidence, losses=[1.0, 2.0])
        if state.phase != before.phase:
            assert state.phase in ALLOWED[before.phase]
        assert state.remaining > 0
        assert state.consecutive <= SMALL.max_consecutive
        state = after_outcome(state, SMALL, succeeded=succeeded)
        before = state
        state, _ = after_divergence(state, SMALL, level=level, checkpoint_step=0)
        if state.phase != before.phase:
            assert state.phase in ALLOWED[before.phase]
        assert PhaseState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_only_ordinary_training_has_backward_passes():
    assert [computes_backward(phase) for phase in PHASES] == [True, True, False, False]
    assert [uses_predictions(phase) for phase in PHASES] == [False, False, True, False]


def test_the_table_for_readers_has_a_row_for_each_change():
    lines = transition_table().splitlines()
    assert len(lines) == 2 + len(TRANSITIONS) == 10
    assert lines[2].startswith("| warmup | full |")
