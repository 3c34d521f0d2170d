"""Losses by the words of a recipe."""

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.losses.catalogue import KINDS, build_loss, build_losses
from narrowcast.workloads.decompose.losses.pgd import PGD


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_loss_is_built_from_its_coefficient_and_refused_without(kind):
    assert build_loss(kind, {"coefficient": 2}).coefficient == 2
    with pytest.raises(ConfigError, match=f"The loss {kind} needs a coefficient"):
        build_loss(kind, {})


def test_settings_reach_the_loss():
    loss = build_loss(
        "pgd", {"coefficient": 0.5, "routing": "uniform_k_subset", "steps": 4, "step_size": 0.5}
    )
    assert loss == PGD(coefficient=0.5, routing="uniform_k_subset", steps=4, step_size=0.5)
    assert loss.name == "pgd_subset"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("stochastics", {}, r"There is no loss 'stochastics'; did you mean stochastic\?"),
        ("zzz", {}, "There is no loss 'zzz'. Write one of faithfulness, "),
        ("pgd", {"step": 4}, r"pgd has no setting 'step'; did you mean steps\?"),
        ("pgd", {"steps": 1.5}, "pgd.steps must be a whole number, got 1.5"),
        ("pgd", {"steps": True}, "pgd.steps must be a whole number, got True"),
        ("pgd", {"scope": "all"}, "pgd.scope must be one of shared, per_datapoint, got 'all'"),
        ("pgd", {"early_steps": "2"}, "pgd.early_steps must be a whole number or nothing, got '2'"),
        (
            "stochastic",
            {"batched": 1},
            "stochastic.batched must be true or false or nothing, got 1",
        ),
        ("unmasked", {"coefficient": "1"}, "unmasked.coefficient must be a number, got '1'"),
        ("unmasked", {"coefficient": 0.0}, "coefficient must be a number above 0, got 0.0"),
        (
            "unmasked",
            {"coefficient": float("nan")},
            "coefficient must be a number above 0, got nan",
        ),
        ("unmasked", {"kind": "pgd"}, "unmasked has no setting 'kind'"),
    ],
)
def test_what_a_loss_does_not_take_is_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_loss(kind, {"coefficient": 1.0, **settings})


def test_losses_of_one_name_are_refused_and_those_of_another_routing_are_not():
    one = ("stochastic", {"coefficient": 1.0})
    layerwise = ("stochastic", {"coefficient": 1.0, "routing": "layerwise"})
    assert [each.name for each in build_losses([one, layerwise])] == [
        "stochastic",
        "stochastic_layerwise",
    ]
    with pytest.raises(ConfigError, match="The loss stochastic is named twice"):
        build_losses([one, layerwise, one])
    with pytest.raises(ConfigError, match="No loss is named"):
        build_losses([])


def test_a_step_without_any_loss_is_refused_before_the_run():
    sometimes = ("pgd", {"coefficient": 1.0, "every": 2})
    assert len(build_losses([sometimes, ("unmasked", {"coefficient": 1.0})])) == 2
    with pytest.raises(ConfigError, match="Some steps would have no loss"):
        build_losses([sometimes])
