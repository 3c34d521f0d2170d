"""The predictors that a recipe asks for, and the settings of its jumps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from narrowcast.config.sections import Recipe
from narrowcast.errors import RecipeError
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


def check_first_jump(recipe: Recipe, settings: PhaseSettings) -> None:
    """Raise if no jump can be tried: the run ends before one is due, or its budget is too small."""
    predictors = predictors_of(recipe, device=torch.device("cpu"))
    jumps = jump_settings_of(recipe, settings)
    every, budget = jumps.history.every, jumps.budget
    first = settings.warmup_steps + settings.full_steps
    while first <= every * max(p.needs for p in predictors):  # too few past weights
        first += settings.full_steps
    if first >= recipe.steps:
        raise RecipeError(
            f"strategy.preset=aggressive cannot try a jump before step {first}, got "
            f"steps={recipe.steps}. Write steps={2 * first} or more, a shorter "
            "strategy.phases.warmup_steps or full_steps, or strategy.preset=balanced."
        )
    lessons = [jumps.predictor_cost * p.cost for p in predictors if p.learns]
    snapshots = 1 + (first - 1) // every
    for cost in lessons * snapshots:
        if budget.may_teach(cost):
            budget = budget.after_lesson(cost)
    cost = max(map(jumps.attempt_cost, predictors))
    if not budget.may_try(cost):
        # Lessons take half of the budget at most.
        needed = min(cost + sum(lessons) * snapshots, 2 * cost)
        share = math.ceil(1000 * needed / (recipe.steps * jumps.step_cost)) / 1000
        steps = math.ceil(2 * cost / (budget.share * jumps.step_cost))
        larger = f"strategy.jumps.budget={share:g} or more, " if share <= 1 else ""
        raise RecipeError(
            f"strategy.preset=aggressive cannot try a jump: one costs up to {cost:g} forward "
            f"passes, and strategy.jumps.budget leaves {budget.left:.4g} in {recipe.steps} steps, "
            f"got strategy.jumps.budget={budget.share:g}. Write {larger}steps={steps} or more, a "
            "cheaper strategy.jumps.predictor such as line, or strategy.preset=balanced."
        )
