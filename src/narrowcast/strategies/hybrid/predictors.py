"""The predictors that a recipe asks for, and the settings of its jumps."""

from collections.abc import Sequence

import torch

from narrowcast.config.sections import Recipe
from narrowcast.strategies.hybrid.control.settings import PhaseSettings
from narrowcast.strategies.hybrid.jumps.budget import STEP_COST, JumpBudget
from narrowcast.strategies.hybrid.jumps.dmd import Modes
from narrowcast.strategies.hybrid.jumps.ensemble import Ensemble
from narrowcast.strategies.hybrid.jumps.history import HistorySettings
from narrowcast.strategies.hybrid.jumps.jump_settings import JumpSettings
from narrowcast.strategies.hybrid.jumps.line import FittedCurve
from narrowcast.strategies.hybrid.jumps.network import NetworkSettings, WeightNetwork
from narrowcast.strategies.hybrid.jumps.predictor import Predictor

SNAPSHOTS = 6
"""Of a full phase: what the predictors need, and one to judge them by."""


def predictors_of(recipe: Recipe, *, device: torch.device) -> list[Predictor]:
    """Return who may predict: the one that is asked for, or all between whom a bandit chooses."""
    name, seed = recipe.strategy.jumps.predictor, recipe.seed
    singles: dict[str, Predictor] = {
        "line": FittedCurve(1),
        "quadratic": FittedCurve(2),
        "dmd": Modes(),
        "network": WeightNetwork(NetworkSettings(seed=seed), device=device),
    }
    if name in singles:
        return [singles[name]]
    if name == "ensemble":
        return [Ensemble(list(singles.values()), device=device)]
    # Each has a state of its own, so the ensemble has members of its own.
    members: list[Predictor] = [FittedCurve(1), FittedCurve(2), Modes()]
    return [*singles.values(), Ensemble(members, device=device)]


def horizons_of(settings: PhaseSettings) -> Sequence[int]:
    """Return how many steps a jump may stand for: the most, a half and a quarter of it."""
    most = settings.max_predict_steps
    return sorted({max(1, most // 4), max(1, most // 2), most})


def jump_settings_of(recipe: Recipe, settings: PhaseSettings) -> JumpSettings:
    """Return all that the jumps of a run are told."""
    asked = recipe.strategy.jumps
    step_cost = STEP_COST * recipe.accumulate
    history = HistorySettings(
        every=max(1, settings.full_steps // SNAPSHOTS),
        most=SNAPSHOTS + 1,
        place=asked.history_on,
        seed=recipe.seed,
    )
    if asked.history_bytes is not None:
        history = HistorySettings(
            every=history.every,
            most=history.most,
            place=history.place,
            seed=history.seed,
            budget_bytes=asked.history_bytes,
        )
    return JumpSettings(
        history=history,
        budget=JumpBudget(
            share=asked.budget,
            planned=recipe.steps * step_cost,
            most_rejections=asked.rejections,
        ),
        batches=asked.micro_batches,
        step_cost=step_cost,
        moments="reset" if asked.reset_moments else "keep",
    )
