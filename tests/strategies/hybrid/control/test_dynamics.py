import math

import numpy as np
import pytest
import torch

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.control.dynamics import (
    DynamicsSettings,
    LossDynamics,
    LossForecast,
)
from narrowcast.strategies.hybrid.control.features import FeatureWindow, features
from narrowcast.strategies.hybrid.control.optimizer_facts import OptimizerFacts
from narrowcast.strategies.hybrid.control.phases import PhaseState

FACTS = OptimizerFacts(lr=1e-3, beta1=0.9, beta2=0.99)
SMALL = DynamicsSettings(members=3, hidden=8)


def curve(step):
    return 1 + 3 * math.exp(-step / 100)


def stream(steps, *, noise=0.05, start=0):
    """Yield what a run shows: its step, its features and its loss."""
    rng, window = np.random.default_rng(0), FeatureWindow()
    for step in range(start, start + steps):
        loss = curve(step) + noise * rng.normal()
        window = window.after(loss, gradient_norm=1 + 0.1 * rng.normal())
        made = features(window, PhaseState(), optimizer=FACTS, confidence=0.5)
        yield step, window, made, loss


def told(dynamics, steps, **how):
    for _, _, made, loss in stream(steps, **how):
        dynamics.observe(made, loss)
    return dynamics


def test_it_learns_where_a_noisy_falling_loss_is_going():
    dynamics = LossDynamics(DynamicsSettings(members=3, hidden=16))
    ours, persistence = [], []
    for step, window, made, loss in stream(100):
        dynamics.observe(made, loss)
        if step >= 40 and step % 10 == 0:
            ahead = curve(step + 10)
            ours.append(abs(dynamics.forecast(10).final_loss - ahead))
            persistence.append(abs(window.loss_average.fast - ahead))
    assert np.mean(ours) < 0.6 * np.mean(persistence)


def test_an_ensemble_that_knows_nothing_predicts_what_it_has_seen():
    dynamics = told(LossDynamics(SMALL), 1)
    forecast = dynamics.forecast(7)
    first = next(stream(1))[3]
    assert forecast.trajectory == pytest.approx([first] * 7, rel=1e-6)
    assert forecast.spread == (0.0,) * 7


def test_members_disagree_more_the_further_they_look():
    forecast = told(LossDynamics(SMALL), 60).forecast(40)
    assert 0 < forecast.spread[0] < forecast.spread[-1]


def test_doubt_of_the_next_batch_is_the_noise_of_batches():
    dynamics = told(LossDynamics(SMALL), 200, noise=0.1, start=2000)  # the curve is flat there
    # In logarithms of one plus the loss: 0.1 / (1 + 1); 50 batches know it to 10 %, three times.
    assert dynamics.forecast(1).aleatoric == pytest.approx(0.05, rel=0.3)


def test_it_is_the_same_from_a_seed_and_another_from_another():
    made = [
        told(LossDynamics(DynamicsSettings(members=2, hidden=4, seed=seed)), 20).forecast(5)
        for seed in (3, 3, 4)
    ]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_it_draws_nothing_from_torchs_own_randomness_and_learns_without_gradients_around_it():
    before = torch.get_rng_state()
    with torch.no_grad():
        quiet = told(LossDynamics(SMALL), 10).forecast(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert quiet == told(LossDynamics(SMALL), 10).forecast(3)


def test_it_stays_on_the_cpu_in_fp32_wherever_the_model_is():
    expected = told(LossDynamics(SMALL), 10).forecast(3)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            elsewhere = told(LossDynamics(SMALL), 10).forecast(3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert elsewhere == expected


@pytest.mark.parametrize("steps", [0, 1, 3, 30])
def test_a_restored_ensemble_goes_on_to_the_bit(steps):
    kept = told(LossDynamics(SMALL), steps)
    state = kept.state_dict()
    restored = LossDynamics(SMALL)
    told(restored, 7)  # what it knew is forgotten
    restored.load_state_dict(state)
    a, b = told(kept, 12, start=30), told(restored, 12, start=30)
    assert a.forecast(9) == b.forecast(9)
    for name, value in a.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b.state_dict()[name]), name
        else:
            assert value == b.state_dict()[name], name


def test_a_state_is_a_copy():
    dynamics = told(LossDynamics(SMALL), 10)
    state = dynamics.state_dict()
    before = state["weights"].clone()
    told(dynamics, 10)
    assert torch.equal(state["weights"], before)


def test_a_state_of_other_settings_is_refused():
    state = LossDynamics(SMALL).state_dict()
    other = LossDynamics(DynamicsSettings(members=4, hidden=8))
    with pytest.raises(CheckpointError, match="write the settings they were saved with"):
        other.load_state_dict(state)


def test_a_wild_loss_moves_members_no_further_than_the_clip_allows():
    dynamics = told(LossDynamics(SMALL), 5)
    row = next(stream(1))[2]
    dynamics.observe(row, 1e99)
    assert dynamics._weights.grad.norm(dim=1) == pytest.approx([5.0] * 3, rel=1e-5)
    huge = torch.full((64,), 3e38)
    dynamics.observe(huge, 1e99)
    assert all(map(math.isfinite, dynamics.forecast(30).trajectory))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_teaches_nothing(bad):
    dynamics = told(LossDynamics(SMALL), 5)
    before = dynamics.forecast(3)
    dynamics.observe(next(stream(1))[2], bad)
    assert dynamics.forecast(3) == before
    assert dynamics.observations == 5


def test_a_forecast_from_nothing_is_refused():
    with pytest.raises(RecipeError, match="tell `observe` of one first"):
        LossDynamics(SMALL).forecast(3)
    with pytest.raises(RecipeError, match="ask for at least one step"):
        told(LossDynamics(SMALL), 2).forecast(0)


def test_bounds_are_two_deviations_either_side_in_logarithms():
    forecast = LossForecast(trajectory=(3.0,), spread=(0.03,), aleatoric=0.04)
    assert forecast.total == pytest.approx(0.05)
    low, high = forecast.bounds
    assert (1 + low, 1 + high) == pytest.approx((4 * math.exp(-0.1), 4 * math.exp(0.1)))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"members": 1}, "write at least 2"),
        ({"hidden": 0}, "positive"),
        ({"lr": math.nan}, "positive"),
    ],
)
def test_an_ensemble_that_cannot_learn_is_refused(bad, match):
    with pytest.raises(RecipeError, match=match):
        DynamicsSettings(**bad)
