"""An ensemble listens to whom has been right."""

import copy

import pytest
import torch

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.jumps.dmd import Modes
from narrowcast.strategies.hybrid.jumps.ensemble import Ensemble, relative_error
from narrowcast.strategies.hybrid.jumps.line import FittedCurve

CPU = torch.device("cpu")


def both():
    return Ensemble([FittedCurve(1), FittedCurve(2)], device=CPU)


def watched(history_of, way, snapshots, ensemble=None):
    ensemble = both() if ensemble is None else ensemble
    history = history_of(way, 1, most=snapshots)
    for time in range(1, snapshots):
        history.take(time * 10, way(time))
        ensemble.observe(history)
    return ensemble, history


def test_who_is_right_is_listened_to(history_of, randn):
    a, b = randn(30), randn(30)
    ensemble, _ = watched(history_of, lambda t: [t * a + t**2 * b], 12)
    of_line, of_parabola = ensemble.weights().tolist()
    assert of_parabola > 0.7
    assert of_line + of_parabola == pytest.approx(1)


def test_it_is_exact_where_all_members_are(history_of, randn):
    slope = randn(30)
    ensemble, history = watched(history_of, lambda t: [t * slope], 6)
    (delta,) = ensemble.predict(history, ahead_steps=20)
    assert torch.allclose(delta, 2 * slope, rtol=1e-4, atol=1e-5)


def test_members_begin_as_equals():
    assert both().weights().tolist() == [0.5, 0.5]


def test_weights_at_rest_stay_at_rest(history_of):
    members = Ensemble([FittedCurve(1), Modes()], device=CPU)
    ensemble, history = watched(history_of, lambda _: [torch.ones(3)], 6, members)
    assert not ensemble.predict(history, ahead_steps=10)[0].any()
    assert ensemble.weights().isfinite().all()


def test_the_error_of_predicting_nothing_is_one(randn):
    moved = [randn(4), randn(2, 2)]
    assert relative_error([torch.zeros_like(m) for m in moved], moved) == 1


def test_a_movement_that_nobody_made_is_a_bounded_error(randn):
    assert relative_error([randn(4)], [torch.zeros(4)]) == 100


def test_a_resumed_ensemble_has_the_same_opinion(history_of, randn):
    a, b = randn(30), randn(30)
    first, history = watched(history_of, lambda t: [t * a + t**2 * b], 6)
    second = both()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    one, other = (e.predict(history, ahead_steps=10)[0] for e in (first, second))
    assert torch.equal(one, other)


def test_an_ensemble_of_others_is_refused():
    with pytest.raises(CheckpointError, match="has line, quadratic, this one dmd"):
        Ensemble([Modes()], device=CPU).load_state_dict(both().state_dict())


def test_an_ensemble_of_none_is_refused():
    with pytest.raises(RecipeError, match="name one or more"):
        Ensemble([], device=CPU)
