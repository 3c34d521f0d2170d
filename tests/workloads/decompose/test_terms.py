"""Every term that a recipe can weigh is one that can be built."""

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe
from narrowcast.workloads.decompose.losses.total import KINDS, make_losses
from narrowcast.workloads.decompose.settings import LossesSection


@pytest.mark.parametrize("name", LossesSection.model_fields)
def test_a_term_with_only_a_coefficient_is_built_with_every_setting(name):
    section = LossesSection.model_validate({name: {"coefficient": 0.5}})
    (built,) = make_losses(section)
    assert built.coefficient == 0.5
    assert built.name == name  # and is in the records under the name of the recipe
    offered = set(type(getattr(section, name)).model_fields)
    # The name of the term decides its routing.
    assert set(type(built).model_fields) - offered <= {"routing", "probability", "batched"}


def test_every_kind_of_loss_can_be_written_in_a_recipe():
    assert KINDS.keys() <= LossesSection.model_fields.keys()


def test_settings_reach_the_term():
    asked = {"coefficient": 1.0, "routing": "static_probability", "probability": 0.25}
    (built,) = make_losses(LossesSection.model_validate({"stochastic_subset": asked}))
    assert (built.routing, built.probability) == ("static_probability", 0.25)
    (built,) = make_losses(LossesSection.model_validate({"pgd": {"coefficient": 1.0, "steps": 4}}))
    assert (built.routing, built.steps) == ("all", 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stochastics.coefficient=1"], "Did you mean stochastic"),
        (["pgd.coefficient=1", "pgd.step=4"], "Did you mean steps"),
        (["pgd.coefficient=1", "pgd.steps=1.5"], "losses.pgd.steps"),
        (["pgd.coefficient=1", "pgd.steps=0"], "losses.pgd.steps"),
        (["pgd.coefficient=1", "pgd.every=0"], "losses.pgd.every"),
        (["pgd.coefficient=1", "pgd.step_size=0"], "losses.pgd.step_size"),
        (["pgd.coefficient=1", "pgd.scope=all"], "losses.pgd.scope"),
        (["pgd.coefficient=1", "pgd.early_steps=2"], "must be set together"),
        (["pgd.coefficient=1", "pgd.early_until=0.5"], "must be set together"),
        (["unmasked.coefficient=nan"], "losses.unmasked.coefficient"),
        (["stochastic.batched=true"], "no such setting"),
        (["minimality.p=0"], "losses.minimality.p"),
        (["minimality.epsilon=0"], "losses.minimality.epsilon"),
        (["minimality.beta=-1"], "losses.minimality.beta"),
        (["minimality.anneal_from=0.5", "minimality.anneal_to=0.5"], "must be below anneal_to"),
        (["minimality.reference_rows=100"], "only for the frequency term"),
        (["minimality.anneal_to=0.5"], "annealing needs p_final"),
        (["persistent_pgd.coefficient=1", "persistent_pgd.lr=0"], "losses.persistent_pgd.lr"),
        (["persistent_pgd.coefficient=1", "persistent_pgd.beta2=1"], "persistent_pgd.beta2"),
        (
            [
                "persistent_pgd.coefficient=1",
                "persistent_pgd.optimizer=sign",
                "persistent_pgd.beta1=0.9",
            ],
            "optimizer=sign has no beta1",
        ),
        (["persistent_pgd.coefficient=1", "persistent_pgd.repeat=2"], "repeat needs scope"),
        (
            ["stochastic_subset.coefficient=1", "stochastic_subset.probability=0.5"],
            "probability must be set together",
        ),
        (
            ["stochastic_subset.coefficient=1", "stochastic_subset.routing=static_probability"],
            "probability must be set together",
        ),
        (
            [f"{name}.coefficient=null" for name in ("minimality", "stochastic")]
            + ["stochastic_layerwise.coefficient=null", "pgd.coefficient=1", "pgd.every=2"],
            "some steps would have no loss",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe("decompose/tms_5-2", [f"losses.{word}" for word in words])


def test_a_term_may_be_left_out_of_some_steps():
    words = ["losses.pgd.coefficient=1", "losses.pgd.every=2"]
    assert load_recipe("decompose/tms_5-2", words).recipe.section(LossesSection).pgd.every == 2
