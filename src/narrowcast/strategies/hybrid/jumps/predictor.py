"""What predicts where the weights go: one protocol for all of them."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.history import WeightHistory


class Predictor(Protocol):
    """Predicts the movement of every weight, signed, from where the weights have been."""

    @property
    def name(self) -> str:
        """What it is called in settings and records."""

    @property
    def needs(self) -> int:
        """Snapshots without which it cannot predict."""

    @property
    def learns(self) -> bool:
        """Whether `observe` does something."""

    @property
    def cost(self) -> float:
        """What a prediction costs, or a lesson, in predictions of a line."""

    def predict(self, history: WeightHistory, *, ahead_steps: int) -> list[Tensor]:
        """Return the movement of each weight over so many steps from the last snapshot, in fp32.

        A history that does not move gives zeros. Fewer than `needs` snapshots are refused.
        """

    def observe(self, history: WeightHistory) -> None:
        """Learn from a history that has one snapshot more than when this was last called."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learnt."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what a saved one had learnt."""


def require(predictor: Predictor, history: WeightHistory, *, ahead_steps: int) -> None:
    """Refuse to predict from too few snapshots, or no step ahead."""
    if len(history) < predictor.needs:
        every = history.settings.every
        raise RecipeError(
            f"the predictor {predictor.name} was asked with {len(history)} snapshots and needs "
            f"{predictor.needs}, {every} steps apart; ask it {every * predictor.needs} steps after "
            "the history began, or write a smaller every"
        )
    if ahead_steps < 1:
        raise RecipeError(
            f"a movement over {ahead_steps} steps was asked for; write ahead_steps=1 or more"
        )


def intervals(history: WeightHistory, ahead_steps: int) -> float:
    """Return steps as a number of times between two snapshots."""
    return ahead_steps / history.settings.every
