"""Corrections have the sign and size of what was wrong, and are bounded."""

import json

import numpy as np
import pytest
import torch

from narrowcast.strategies.hybrid.jumps.correction import (
    Correction,
    CorrectionSettings,
    corrected,
    layer_features,
    micro_correction,
)
from narrowcast.strategies.hybrid.jumps.residuals import LayerResidual, Residual, Residuals

RUN = (1.0, 2.0)
LAYERS = [[1.0, 0.0], [1.0, 1.0]]


def residual(errors, *, step=0, confidence=1.0, features=RUN):
    layers = tuple(LayerResidual(1.0, 0.9, error) for error in errors)
    return Residual(step, 10, layers, features, confidence)


def learnt(errors, *, times=1, settings=None):
    kept, correction = Residuals(), Correction(settings)
    for step in range(times):
        one = residual(errors, step=step)
        kept.add(one)
        correction.update(one, LAYERS)
    return kept, correction


def corrections(kept, correction, *, step=0):
    return correction.corrections(kept, step=step, features=RUN, layer_features=LAYERS)


def test_before_any_residual_nothing_is_corrected():
    assert corrections(Residuals(), Correction()) == [0.0, 0.0]


def test_predictions_that_were_too_long_are_shortened_and_others_lengthened():
    shorter, longer = corrections(*learnt([-0.1, 0.05], times=50), step=50)
    assert shorter == pytest.approx(-0.1, abs=0.005)
    assert longer == pytest.approx(0.05, abs=0.005)


def test_a_correction_is_at_most_a_fifth():
    assert corrections(*learnt([-5.0, 5.0], times=50), step=50) == [-0.2, 0.2]


def test_the_blend_is_seven_tenths_of_similar_residuals_and_three_of_the_regression():
    kept, correction = learnt([-0.1, 0.05])
    blended = corrections(kept, correction)
    both = zip([-0.1, 0.05], correction.regressed(LAYERS), strict=True)
    assert blended == pytest.approx([0.7 * r + 0.3 * g for r, g in both])


def test_the_regression_is_the_closed_form_of_ridge():
    x, y = np.random.default_rng(0).normal(size=(6, 3)), np.linspace(-0.3, 0.3, 6)
    correction = Correction(CorrectionSettings(ridge=0.5))
    correction.update(residual(y), x.tolist())
    # Ridge is least squares with further rows: the root of the penalty towards zero.
    rows, zeros = np.vstack([x, np.sqrt(0.5) * np.eye(3)]), np.zeros(3)
    solved = np.linalg.lstsq(rows, np.concatenate([y, zeros]), rcond=None)[0]
    np.testing.assert_allclose(correction.regressed(x.tolist()), x @ solved, atol=1e-12)


def test_newer_and_surer_residuals_count_more():
    correction = Correction()
    old, new = residual([1.0], step=0), residual([0.0], step=100)
    assert correction.remembered([old, new], step=100) == pytest.approx([0.95 / 1.95])
    unsure = residual([1.0], step=100, confidence=0.25)
    assert correction.remembered([unsure, new], step=100) == pytest.approx([0.2])
    assert correction.remembered([residual([1.0], confidence=0.0)], step=0) == [0.0]


def test_movements_are_made_longer_by_their_corrections():
    one, other = corrected([torch.ones(2), torch.ones(3)], [0.1, -0.2])
    assert torch.allclose(one, torch.full((2,), 1.1))
    assert torch.allclose(other, torch.full((3,), 0.8))


def test_inside_a_stretch_every_few_steps_are_corrected():
    def at(into, interval):
        return float(micro_correction([torch.ones(())], [0.1], into=into, interval=interval)[0])

    assert [at(into, 3) > 1 for into in range(7)] == [0, 0, 0, 1, 0, 0, 1]
    assert [at(into, 0) for into in range(4)] == [1.0] * 4


def test_features_of_layers_tell_a_turn_from_a_straight_way(history_of):
    ways = lambda t: [torch.full((2, 2), float(t)), torch.tensor([-1.0, 1.0]) ** t]  # noqa: E731
    straight, turning = layer_features(history_of(ways, 4), ahead_steps=20)
    assert straight[:4] == [1.0, 0.0, 1.0, pytest.approx(np.log10(4) / 4)]
    assert straight[4:] == [pytest.approx(1.0), pytest.approx(0.0), 1.0]
    assert turning[4] == pytest.approx(-1.0)


def test_features_of_a_history_at_rest_are_finite(history_of):
    found = layer_features(history_of(lambda _: [torch.ones(3)], 2), ahead_steps=10)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("times", [0, 3])
def test_a_correction_survives_json(times):
    kept, correction = learnt([-0.1, 0.05], times=times)
    again = Correction()
    again.load_state_dict(json.loads(json.dumps(correction.state_dict())))
    assert corrections(kept, again) == corrections(kept, correction)
