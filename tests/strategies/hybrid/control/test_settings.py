import math

import pytest

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.control.settings import PRESETS, PhaseSettings


def test_presets_are_those_that_were_recommended():
    table = [
        (
            s.warmup_steps,
            s.full_steps,
            s.max_predict_steps,
            s.confidence_threshold,
            s.divergence_sigma,
        )
        for s in map(PhaseSettings.preset, PRESETS)
    ]
    assert table == [(200, 30, 25, 0.90, 2.2), (100, 20, 40, 0.85, 2.5), (50, 15, 80, 0.75, 3.5)]


def test_a_misspelt_preset_is_refused_with_a_suggestion():
    with pytest.raises(RecipeError, match="did you mean balanced"):
        PhaseSettings.preset("balancd")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("warmup_steps", -1),
        ("full_steps", 0),
        ("max_predict_steps", 0),
        ("min_predict_steps", 0),
        ("max_consecutive", 0),
        ("validation_samples", 0),
    ],
)
def test_a_phase_without_steps_is_refused_by_name(name, bad):
    with pytest.raises(RecipeError, match=f"{name}={bad} .*write a whole number from {bad + 1}"):
        PhaseSettings(**{name: bad})


@pytest.mark.parametrize("bad", [math.inf, 20.0, True])
def test_a_phase_that_need_not_end_is_refused(bad):
    with pytest.raises(RecipeError, match="a phase has to end; write a whole number"):
        PhaseSettings(full_steps=bad)


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 85, math.nan])
def test_a_threshold_that_is_no_probability_is_refused(bad):
    with pytest.raises(RecipeError, match=r"write one between 0 and 1, such as 0\.85"):
        PhaseSettings(confidence_threshold=bad)


@pytest.mark.parametrize("name", ["divergence_sigma", "fallback_sigma", "max_correction"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_sees_everything_or_nothing_is_refused(name, bad):
    with pytest.raises(RecipeError, match=f"{name}=.*write a positive number"):
        PhaseSettings(**{name: bad})
