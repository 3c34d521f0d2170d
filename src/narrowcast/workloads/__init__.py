"""What can be trained: a folder a workload and a line in `WORKLOADS`; delete both and it is gone.

A workload's folder has a `settings` module with its two recipe sections as `SECTIONS`, which does
not import torch, and a `task` module with `build_task(recipe, *, device)`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from narrowcast import config
from narrowcast.errors import RecipeError

if TYPE_CHECKING:
    import torch

    from narrowcast.training.task import Task

WORKLOADS: Mapping[str, str] = {
    "lm": "narrowcast.workloads.lm",
}
"""Each workload by the name recipes use, with the package it lives in."""


def sections_of(workload: str) -> config.Sections:
    """Return the recipe sections of `workload`, without importing torch."""
    module = importlib.import_module(f"{_package(workload)}.settings")
    return cast(config.Sections, module.SECTIONS)


def load_recipe(source: str | Path, overrides: Iterable[str] = ()) -> config.LoadedRecipe:
    """Load a shipped recipe or a YAML file, with `key=value` words that win over it."""
    return config.load_recipe(source, overrides, sections=sections_of)


def build_task(recipe: config.Recipe, *, device: torch.device) -> Task:
    """Build what `recipe` trains and trains on, on `device`; on the meta device only shapes."""
    module = importlib.import_module(f"{_package(recipe.workload)}.task")
    return cast("Task", module.build_task(recipe, device=device))


def _package(workload: str) -> str:
    try:
        return WORKLOADS[workload]
    except KeyError:
        close = difflib.get_close_matches(workload, WORKLOADS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(WORKLOADS)}"
        raise RecipeError(f"no such workload as {workload!r}; {hint}") from None
