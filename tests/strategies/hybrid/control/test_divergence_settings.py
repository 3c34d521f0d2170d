import math

import pytest

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.control.divergence_settings import DivergenceSettings


@pytest.mark.parametrize(
    "bad", [{"loss_sigma": 0.0}, {"noise_floor": math.nan}, {"baseline_observations": 0}]
)
def test_settings_that_see_everything_or_nothing_are_refused(bad):
    with pytest.raises(RecipeError, match="write a positive number"):
        DivergenceSettings(**bad)


@pytest.mark.parametrize("name", ["ema_decay", "recent_decay", "caution_share"])
def test_a_share_of_one_is_refused(name):
    with pytest.raises(RecipeError, match=f"divergence.{name} has to be below 1"):
        DivergenceSettings(**{name: 1.0})
