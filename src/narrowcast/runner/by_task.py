"""What `precision.task` decides in a run: its row for the model's size, on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.config import LoadedRecipe
from narrowcast.errors import RecipeError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.tasks import TaskPrecision, apply_task, optimal_precision
from narrowcast.training.phase_plans import plan_phases
from narrowcast.workloads import build_task

FORMATS = ("precision.policy", "precision.adapt.overflows")
"""The settings of a row that a plan may refuse."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A recipe with what its task has decided."""

    loaded: LoadedRecipe
    row: Mapping[str, Any] | None = None
    """As plan.json keeps it; None where the recipe names no task."""


def decided(loaded: LoadedRecipe, hardware: Hardware) -> Decided:
    """Give a recipe what suits its task, and say which row that was; one without is left as it is.

    What would be refused, and would not be without the row, is left out and told.
    """
    recipe = loaded.recipe
    if recipe.precision.task is None:
        return Decided(loaded=loaded)
    task = build_task(recipe, device=torch.device("meta"))
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    chosen = optimal_precision(recipe.precision.task, parameters, hardware)
    after = apply_task(loaded, chosen)
    try:
        plan_phases(after.recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)
    except (RecipeError, UnsupportedError) as error:
        left_out = (*chosen.left_out, f"policy {chosen.policy}: {error}")
        chosen = replace(chosen, left_out=left_out)
        after = apply_task(loaded, chosen, without=FORMATS)
    return Decided(loaded=after, row=_told(chosen, parameters, after))


def _told(chosen: TaskPrecision, parameters: int, loaded: LoadedRecipe) -> dict[str, Any]:
    """Return a row as plain data, with what came of each of its settings."""
    resolved, wanted = loaded.resolved(), chosen.settings()
    return {
        "task": chosen.task,
        "size": chosen.size,
        "parameters": parameters,
        "hardware": chosen.hardware,
        "why": chosen.row,
        "reason": chosen.reason,
        "settings": {key: resolved[key] for key in wanted if key in resolved},
        "left_out": list(chosen.left_out),
    }
