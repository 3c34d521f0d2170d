import itertools

import pytest

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.precision.plan.phases import PHASES, PhasePolicies, bytes_a_number

DISTRIBUTION = {"warmup": 0.1, "full": 0.2, "predict": 0.6, "correct": 0.1}


def policies(shortcut):
    return [shortcut.policy(phase) for phase in PHASES]


def test_by_default_only_predictions_are_narrow():
    assert policies(PhasePolicies()) == ["fp32", "fp32", "bf16", "fp32"]


def test_presets_differ_in_what_they_risk():
    assert policies(PhasePolicies.conservative()) == ["fp32"] * 4
    assert policies(PhasePolicies.aggressive()) == ["fp32", "bf16", "fp16", "fp32"]


def test_what_is_said_goes_before_what_is_recommended_and_that_before_the_default():
    said = PhasePolicies(default="tf32", overrides={"full": "fp8-row"})
    assert policies(said) == ["fp32", "fp8-row", "bf16", "fp32"]
    quiet = PhasePolicies(default="tf32", overrides={"full": "fp8-row"}, auto_recommend=False)
    assert policies(quiet) == ["tf32", "fp8-row", "tf32", "tf32"]
    assert policies(PhasePolicies(enabled=False, overrides={"full": "bf16"})) == ["fp32"] * 4


def test_one_phase_is_changed_and_the_rest_stays():
    changed = PhasePolicies().with_phase("predict", "fp16").with_phase("correct", "bf16")
    assert policies(changed) == ["fp32", "fp32", "fp16", "bf16"]
    assert policies(PhasePolicies())[2] == "bf16"


def test_sixty_percent_of_predictions_in_bf16_take_seventy_percent_of_fp32():
    assert PhasePolicies().share_of_fp32(DISTRIBUTION) == pytest.approx(0.7, abs=1e-15)
    assert PhasePolicies().memory_savings(DISTRIBUTION) == pytest.approx(0.3, abs=1e-15)
    assert PhasePolicies.conservative().share_of_fp32(DISTRIBUTION) == 1.0
    assert PhasePolicies.aggressive().share_of_fp32(DISTRIBUTION) == pytest.approx(0.6, abs=1e-15)


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_in_one_phase_saves_what_its_format_does(phase):
    for policy, share in {"fp32": 1.0, "tf32": 1.0, "bf16": 0.5, "fp8-row": 0.25}.items():
        assert PhasePolicies(overrides={phase: policy}).share_of_fp32({phase: 1.0}) == share


def test_block_formats_count_their_scales():
    assert bytes_a_number("compute=mxfp8") == 1 + 1 / 32


@pytest.mark.parametrize("bad", ["predct", "", "evaluate"])
def test_a_phase_that_is_none_is_refused(bad):
    with pytest.raises(ConfigError, match="The phases are warmup, full, predict, correct"):
        PhasePolicies(overrides={bad: "bf16"})


def test_a_misspelt_phase_is_guessed():
    with pytest.raises(ConfigError, match="did you mean predict"):
        PhasePolicies().policy("predct")


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="no preset 'fp61'"):
        PhasePolicies().with_phase("full", "fp61")


@pytest.mark.parametrize("shares", [{}, {"full": 0.9}, {"full": 0.6, "predict": 0.6}])
def test_shares_that_do_not_make_one_are_refused(shares):
    with pytest.raises(ConfigError, match="must add up to 1"):
        PhasePolicies().share_of_fp32(shares)


def test_a_negative_share_is_refused():
    with pytest.raises(ConfigError, match=r"phase full must be between 0 and 1, got -0.1"):
        PhasePolicies().share_of_fp32({"predict": 1.0, "full": -0.1})


def test_every_preset_names_policies_that_exist():
    made = (PhasePolicies(), PhasePolicies.conservative(), PhasePolicies.aggressive())
    for shortcut, phase in itertools.product(made, PHASES):
        assert isinstance(nc.policy(shortcut.policy(phase)), nc.Policy)
