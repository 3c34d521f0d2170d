"""The control of hybrid training as a whole: phases, confidence, divergence, metrics together."""

import json
import math
from typing import NamedTuple

import numpy as np
import pytest

from narrowcast.strategies.hybrid.control.confidence import Calibration, raw_score
from narrowcast.strategies.hybrid.control.divergence import Monitor, Observation, observed
from narrowcast.strategies.hybrid.control.divergence_settings import DivergenceSettings
from narrowcast.strategies.hybrid.control.features import FeatureWindow
from narrowcast.strategies.hybrid.control.metrics import (
    JumpVerified,
    StepDone,
    TrainingStatistics,
)
from narrowcast.strategies.hybrid.control.phases import (
    PhaseState,
    after_divergence,
    after_outcome,
    computes_backward,
    next_decision,
)
from narrowcast.strategies.hybrid.control.settings import PhaseSettings

SETTINGS = PhaseSettings.preset("balanced")
WATCHED = DivergenceSettings(loss_sigma=SETTINGS.divergence_sigma)


class Control(NamedTuple):
    state: PhaseState = PhaseState()
    window: FeatureWindow = FeatureWindow()
    monitor: Monitor = Monitor()
    calibration: Calibration = Calibration()
    statistics: TrainingStatistics = TrainingStatistics()

    def saved_and_restored(self):
        told = json.loads(json.dumps([part.to_json() for part in self]))
        return Control(*(type(p).from_json(d) for p, d in zip(self, told, strict=True)))


def advanced(control, acceptance):
    """Return the control after one turn of a simulated run whose jumps are accepted so often."""
    state, window, monitor, calibration, statistics = control
    rng = np.random.default_rng(state.step)
    score = raw_score(total=0.05, errors=window.errors, average=window.loss_average)
    confidence = calibration.estimate(score).probability
    state = next_decision(state, SETTINGS, confidence=confidence, losses=window.losses)
    loss = 2 + 2 * math.exp(-state.step / 400) + 0.05 * rng.normal()
    accepted, steps, forwards = bool(rng.uniform() < acceptance), 1, 0
    window = window.after(loss)
    threshold = SETTINGS.confidence_threshold
    if state.phase == "predict":
        steps, forwards = (state.remaining if accepted else 1), 2
        calibration = calibration.after(score, accepted=accepted)
        jump = JumpVerified(length=state.decision.steps, accepted=accepted, score=score)
        statistics = statistics.after(jump)
    elif state.phase == "full" and calibration.needs_trial(score, threshold=threshold):
        calibration, forwards = calibration.after(score, accepted=accepted), 2
    elif state.phase == "full":
        calibration = calibration.faded()
    elif state.phase == "correct":
        forwards = 1
    backward = computes_backward(state.phase)
    done = StepDone(
        phase=state.phase, loss=loss, precision="fp32", backward=backward, forwards=forwards
    )
    failed = state.phase == "predict" and not accepted
    state = after_outcome(state, SETTINGS, succeeded=not failed, steps=steps)
    monitor, assessment = observed(monitor, Observation(loss=loss), settings=WATCHED)
    state, _ = after_divergence(state, SETTINGS, level=assessment.level, checkpoint_step=0)
    return Control(state, window, monitor, calibration, statistics.after(done))


def run(steps, acceptance, control=None):
    control = control or Control()
    while control.state.step < steps:
        control = advanced(control, acceptance)
    return control


def test_where_jumps_are_accepted_it_begins_to_jump_by_itself_and_saves_half():
    end = run(1500, 0.95)
    assert end.statistics.jumps > 10
    assert end.statistics.step_equivalents < 1500 / 2


def test_where_they_are_not_it_costs_at_most_a_fiftieth_more_than_ordinary_training():
    end = run(1500, 0.1)
    assert end.statistics.steps_by_phase["predict"] <= 5
    assert end.statistics.step_equivalents < 1500 * 1.02


@pytest.mark.parametrize("stop", [50, 333])
def test_a_run_taken_up_again_from_json_decides_the_same(stop):
    at_once = run(600, 0.9)
    halfway = run(stop, 0.9).saved_and_restored()
    assert run(600, 0.9, halfway) == at_once
