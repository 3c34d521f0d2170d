"""Every term that a recipe can weigh is one that can be built."""

from dataclasses import fields

import pytest

from narrowcast.workloads.decompose.build import make_losses
from narrowcast.workloads.decompose.terms import LossesSection


@pytest.mark.parametrize("name", LossesSection.model_fields)
def test_a_term_with_nothing_but_a_coefficient_is_built(name):
    (built,) = make_losses(LossesSection.model_validate({name: {"coefficient": 0.5}}))
    assert built.coefficient == 0.5
    assert built.name == name  # and is told of under the name that it was asked for by


def test_a_probability_reaches_the_term_that_routes_by_it():
    asked = {"coefficient": 1.0, "routing": "static_probability", "probability": 0.25}
    (built,) = make_losses(LossesSection.model_validate({"stochastic_subset": asked}))
    assert (built.routing, built.probability) == ("static_probability", 0.25)


@pytest.mark.parametrize("name", LossesSection.model_fields)
def test_recipe_offers_every_setting_of_a_term(name):
    section = LossesSection.model_validate({name: {"coefficient": 0.5}})
    (built,) = make_losses(section)
    offered = set(type(getattr(section, name)).model_fields)
    # The name of the term decides its routing.
    assert {each.name for each in fields(built)} - offered <= {"routing", "probability", "batched"}
