import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.strategies.hybrid.control.features import NAMES, FeatureWindow, features
from narrowcast.strategies.hybrid.control.optimizer_facts import OptimizerFacts
from narrowcast.strategies.hybrid.control.phases import (
    PhaseState,
    after_outcome,
    next_decision,
)
from narrowcast.strategies.hybrid.control.settings import PhaseSettings

SETTINGS = PhaseSettings(warmup_steps=40, full_steps=5, max_predict_steps=12)


def facts(step):
    return OptimizerFacts(
        lr=1e-3 / (step + 1),
        momentum_mean=math.sin(step),
        momentum_std=1 / (step + 1),
        variance_mean=2 / (step + 1),
        variance_std=3 / (step + 1),
        beta1=0.9,
        beta2=0.999,
    )


def window(losses, norms=None):
    made = FeatureWindow()
    for index, loss in enumerate(losses):
        made = made.after(float(loss), None if norms is None else float(norms[index]))
    return made


def named(made, state=None, *, step=0, confidence=0.5):
    vector = features(made, state or PhaseState(), optimizer=facts(step), confidence=confidence)
    return dict(zip(NAMES, vector.tolist(), strict=True))


def test_there_are_64_features_with_64_names():
    assert len(NAMES) == len(set(NAMES)) == 64
    vector = features(window([1.0]), PhaseState(), optimizer=facts(0), confidence=0.5)
    assert (vector.shape, vector.dtype, vector.device.type) == ((64,), torch.float32, "cpu")


def test_every_feature_moves_in_a_run():
    rng = np.random.default_rng(0)
    made, state, rows = FeatureWindow(), PhaseState(), []
    for step in range(200):
        state = next_decision(state, SETTINGS, confidence=0.9, losses=made.losses)
        rows.append(features(made, state, optimizer=facts(step), confidence=rng.uniform()))
        loss = 2 + math.exp(-step / 50) + rng.normal() / 10
        made = made.after(loss, gradient_norm=rng.lognormal())
        made = made.after_prediction(predicted=2.0, actual=loss)
        if state.phase == "predict":
            made = made.after_jump(accepted=bool(rng.integers(2)))
        state = after_outcome(state, SETTINGS, succeeded=True)
    still = torch.stack(rows).std(0) == 0
    assert [name for name, is_still in zip(NAMES, still.tolist(), strict=True) if is_still] == []


def test_losses_are_summed_up_as_numpy_does():
    losses = np.random.default_rng(1).normal(3, 0.5, size=300)
    got = named(window(losses))
    kept = losses[-256:]
    expected = {
        "loss": losses[-1],
        "loss mean": kept.mean(),
        "loss std": kept.std(),
        "loss min": kept.min(),
        "loss max": kept.max(),
        "loss trend": losses[-16:].mean() - losses[-32:-16].mean(),
        "loss ratio": losses[-1] / kept.mean(),
        "step": 0.03,
        "loss slope": np.polyfit(np.arange(64), losses[-64:], 1)[0],
        "loss median": np.median(losses[-64:]),
        "loss 3 ago": (losses[-4] - kept.mean()) / kept.std(),
    }
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_norms_are_summed_up_over_64_with_bounds():
    norms = np.random.default_rng(2).lognormal(size=100)
    norms[-1] = 1e9
    got = named(window(np.ones(100), norms))
    kept = norms[-64:]
    assert got["norm log10"] == pytest.approx(9)
    assert got["norm ratio"] == 10  # at most
    assert got["norm noise"] == pytest.approx(kept.std() / kept.mean(), rel=1e-6)
    silent = named(window(np.ones(3), np.zeros(3)))
    assert silent["norm log10"] == -10
    assert silent["norm ratio"] == 1


def test_optimizer_features_are_filled():
    got = named(window([1.0] * 10), step=4)
    assert got["log10 effective lr"] == pytest.approx(
        math.log10(1e-3 / 5 / (math.sqrt(2 / 5) + 1e-8)), rel=1e-6
    )
    assert got["beta1 to the step"] == pytest.approx(0.9**10, rel=1e-6)
    assert got["beta2 to the step"] == pytest.approx(0.999**10, rel=1e-6)


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(numbers, numbers | st.none()), max_size=40))
def test_features_are_finite_whatever_happens(history):
    made = FeatureWindow()
    for loss, norm in history:
        made = made.after(loss, norm).after_prediction(predicted=loss, actual=norm or 0.0)
    vector = features(made, PhaseState(), optimizer=facts(3), confidence=0.1)
    assert bool(vector.isfinite().all())


def test_windows_keep_no_more_than_they_say_and_come_back_from_json():
    made = window(range(300), range(300))
    for index in range(60):
        made = made.after_prediction(predicted=1.0, actual=2.0).after_jump(accepted=index % 2 == 0)
    lengths = [len(each) for each in (made.losses, made.norms, made.errors, made.jumps)]
    assert lengths == [256, 64, 50, 50]
    assert FeatureWindow.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_bad_step_only_counts():
    made = window([1.0, 2.0])
    after = made.after(math.nan, math.inf).after_prediction(predicted=math.nan, actual=1.0)
    assert after.step == 3
    assert (after.losses, after.norms, after.errors) == (made.losses, (), ())
