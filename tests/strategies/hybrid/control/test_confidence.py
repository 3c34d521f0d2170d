import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.control.averages import MultiScaleAverage
from narrowcast.strategies.hybrid.control.confidence import Calibration, raw_score
from narrowcast.strategies.hybrid.control.settings import PRESETS, PhaseSettings

CALM = MultiScaleAverage(2.0, 2.0, 2.0, 9)


def simulated(trials, probability, *, seed=0):
    """Return a calibration, what it said before each trial, and what came of it."""
    rng = np.random.default_rng(seed)
    calibration, said, came = Calibration(), [], []
    for _ in range(trials):
        score = float(rng.uniform(0.3, 1.0))
        accepted = bool(rng.uniform() < probability(score))
        said.append(calibration.estimate(score).probability)
        came.append(accepted)
        calibration = calibration.after(score, accepted=accepted)
    return calibration, said, came


def test_the_score_is_the_formula():
    assert raw_score(total=0.0, errors=[], average=CALM) == pytest.approx(0.88)
    assert raw_score(total=1.0, errors=[0.0] * 9, average=CALM) == pytest.approx(0.2 + 0.28 + 0.2)
    assert raw_score(total=0.0, errors=[0.25] * 10, average=CALM) == pytest.approx(0.4 + 0.32 + 0.2)
    assert raw_score(total=0.0, errors=[0.0] * 10, average=CALM) == pytest.approx(0.4 + 0.396 + 0.2)
    # 1 / (1 + 2 * 0.25) of two thirds; and never less than a half.
    moving, wild = MultiScaleAverage(2.5, 2.0, 2.0, 9), MultiScaleAverage(9.0, 2.0, 1.0, 9)
    assert raw_score(total=0.0, errors=[], average=moving) == pytest.approx(0.68 + 0.2 * 2 / 3)
    assert raw_score(total=0.0, errors=[], average=wild) == pytest.approx(0.68 + 0.1)


def test_only_the_last_fifty_errors_count():
    errors = [100.0] * 60 + [0.0] * 50
    assert raw_score(total=0.0, errors=errors, average=CALM) == pytest.approx(0.996)


def test_it_begins_with_unknown_which_no_preset_takes_for_sure():
    estimate = Calibration().estimate(0.88)
    assert estimate.probability == 0.5
    assert estimate.deviation == pytest.approx(math.sqrt(1 / 12))  # of a flat distribution
    thresholds = [PhaseSettings.preset(name).confidence_threshold for name in PRESETS]
    assert estimate.probability < min(thresholds)
    assert Calibration().needs_trial(0.88, threshold=0.85)


def test_probabilities_come_to_what_happens():
    calibration, _, _ = simulated(3000, lambda score: score**2)
    for score in (0.45, 0.65, 0.95):
        estimate = calibration.estimate(score)
        # 200 remembered trials in seven classes.
        assert estimate.probability == pytest.approx(score**2, abs=3 * estimate.deviation)


def test_what_it_says_is_calibrated_and_better_than_a_half():
    calibration, _, _ = simulated(3000, lambda score: score**2)
    assert calibration.expected_error < 0.05
    assert calibration.brier < 0.2
    assert calibration.trials == 3000


def test_a_score_that_means_nothing_gets_one_probability():
    calibration, _, _ = simulated(2000, lambda _: 0.1)
    said = [calibration.estimate(score).probability for score in (0.35, 0.55, 0.75, 0.95)]
    assert max(said) < 0.3


def test_brier_score_and_calibration_error_are_as_others_compute_them():
    calibration, said, came = simulated(400, lambda score: score)
    assert calibration.brier == pytest.approx(brier_score_loss(came, said), rel=1e-12)
    said, came = np.array(said), np.array(came, dtype=float)
    place = np.minimum((said * 10).astype(int), 9)
    error = sum(
        abs(said[place == i].mean() - came[place == i].mean()) * (place == i).mean()
        for i in np.unique(place)
    )
    assert calibration.expected_error == pytest.approx(error, rel=1e-12)
    assert sum(row.trials for row in calibration.table()) == 400


def test_it_forgets_so_that_jumps_that_no_longer_pay_are_known():
    calibration = Calibration(memory=50)
    for accepted in [True] * 200 + [False] * 100:
        calibration = calibration.after(0.9, accepted=accepted)
    assert calibration.estimate(0.9).probability < 0.2


def tried(outcomes):
    calibration = Calibration()
    for accepted in outcomes:
        calibration = calibration.after(0.9, accepted=accepted)
    return calibration


@pytest.mark.parametrize(
    ("outcomes", "needed"),
    [
        ([True, False], True),  # too few to tell
        ([True] * 8 + [False] * 2, True),  # 0.79, within a deviation
        ([False] * 10, False),  # hopeless
        ([True] * 30, False),  # sure: it is predicted, and learned from that
    ],
)
def test_a_trial_is_needed_where_it_could_show_that_the_threshold_is_passed(outcomes, needed):
    assert tried(outcomes).needs_trial(0.9, threshold=0.85) == needed


def test_what_has_not_been_tried_for_long_is_unknown_again():
    calibration = tried([False] * 20)
    before = calibration.brier
    for _ in range(2000):
        calibration = calibration.faded()
    assert calibration.estimate(0.9).probability == pytest.approx(0.5, abs=0.001)
    assert calibration.needs_trial(0.9, threshold=0.85)
    assert calibration.brier == before


def test_without_trials_there_is_no_table():
    assert (Calibration().brier, Calibration().expected_error) == (None, None)
    assert Calibration().table() == ()


@given(st.lists(st.tuples(st.floats(), st.booleans()), max_size=50), st.floats())
def test_it_is_a_probability_whatever_the_scores_and_comes_back_from_json(trials, score):
    calibration = Calibration()
    for each, accepted in trials:
        calibration = calibration.after(each, accepted=accepted)
    assert 0 < calibration.estimate(score).probability < 1
    assert Calibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration


def test_a_calibration_that_remembers_nothing_is_refused():
    with pytest.raises(RecipeError, match="would forget every trial"):
        Calibration(memory=0.5)
