"""The settings that `precision.task` selects for the model's size and this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.config import LoadedRecipe, Recipe
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.kernels import launch
from narrowcast.precision.plan.tasks import TaskPrecision, optimal_precision
from narrowcast.report.phrases import written
from narrowcast.training.phase_plans import plan_phases
from narrowcast.workloads import build_task

REFUSABLE = (
    ("precision.policy", "precision.adapt.overflows"),
    ("memory.activation_checkpointing",),
    ("memory.offload",),
)
"""Settings that a plan may reject; those in one group are used or left out together."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A recipe with the settings that its task selected."""

    loaded: LoadedRecipe
    row: Mapping[str, Any] | None = None
    """The row as in plan.json; None if the recipe names no task."""


def decided(loaded: LoadedRecipe, hardware: Hardware) -> Decided:
    """Add the settings of `precision.task` to a recipe, leaving out those that would raise."""
    recipe = loaded.recipe
    if recipe.precision.task is None:
        return Decided(loaded=loaded)
    task = build_task(recipe, device=torch.device("meta"))
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    chosen = optimal_precision(recipe.precision.task, parameters, hardware)
    defaults, left_out = chosen.defaults_for(loaded), list(chosen.left_out)
    refusable = {key for group in REFUSABLE for key in group}
    after = loaded.with_defaults(
        {key: value for key, value in defaults.items() if key not in refusable},
        origin=chosen.origin,
    )
    for group in REFUSABLE:
        some = {key: defaults[key] for key in group if key in defaults}
        try:
            with_some = after.with_defaults(some, origin=chosen.origin)
            _check_memory_settings(with_some.recipe, hardware)
            plan_phases(with_some.recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)
        except (ConfigError, UnsupportedError) as error:
            requested = some[group[0]]
            text = written(list(requested) if isinstance(requested, tuple) else requested)
            left_out.append(f"{group[0]}={text}: {error}")
        else:
            after = with_some
    return Decided(
        loaded=after, row=_row_data(replace(chosen, left_out=tuple(left_out)), parameters, after)
    )


def _check_memory_settings(recipe: Recipe, hardware: Hardware) -> None:
    """Raise for memory settings that preparing the model would reject."""
    memory = recipe.memory
    if recipe.cuda_graph and (memory.activation_checkpointing != "none" or memory.offload):
        raise UnsupportedError("cuda_graph=true holds the memory of a captured step")
    if "optimizer" not in memory.offload:
        return
    if recipe.optimizer.name not in ("adamw", "adam"):
        raise UnsupportedError(f"{recipe.optimizer.name} cannot offload its optimizer state")
    if torch.cuda.is_available() and (
        why := launch.unsupported_reason(torch.device(hardware.device))
    ):
        raise UnsupportedError(why)


def _row_data(chosen: TaskPrecision, parameters: int, loaded: LoadedRecipe) -> dict[str, Any]:
    """Return a row as plain data, with the value that each of its settings got."""
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
