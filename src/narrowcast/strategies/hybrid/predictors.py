"""The predictors that a recipe asks for, and the settings of its jumps."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from narrowcast.config.sections import Recipe
from narrowcast.strategies.hybrid.control.settings import PhaseSettings
from narrowcast.strategies.hybrid.jumps.budget import STEP_COST, JumpBudget
from narrowcast.strategies.hybrid.jumps.history import HistorySettings
from narrowcast.strategies.hybrid.jumps.jump_settings import JumpSettings
from narrowcast.strategies.hybrid.jumps.predictor import Predictor
from narrowcast.strategies.hybrid.jumps.predictors import PREDICTORS, predictor_named

SNAPSHOTS = 6
"""Of a full phase: what the predictors need, and one to judge them by."""


def predictors_of(recipe: Recipe, *, device: torch.device) -> list[Predictor]:
    """Return who may predict: the one that is asked for, or all between whom a bandit chooses."""
    asked = recipe.strategy.jumps.predictor
    names = list(PREDICTORS) if asked == "bandit" else [asked]
    return [predictor_named(name, device=device, seed=recipe.seed) for name in names]


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
        history = replace(history, budget_bytes=asked.history_bytes)
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
