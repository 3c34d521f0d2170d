"""Recipes. Names are imported when first used, so that a workload needs no pydantic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.config.load import LoadedRecipe as LoadedRecipe
    from narrowcast.config.load import from_resolved as from_resolved
    from narrowcast.config.load import load_recipe as load_recipe
    from narrowcast.config.registry import Registry as Registry
    from narrowcast.config.schema import recipe_schema as recipe_schema
    from narrowcast.config.sections import DataSection as DataSection
    from narrowcast.config.sections import Recipe as Recipe
    from narrowcast.config.sections import Section as Section
    from narrowcast.config.sections import Sections as Sections
    from narrowcast.config.workload import Workload as Workload

_HOMES = {
    "load": ("LoadedRecipe", "from_resolved", "load_recipe"),
    "registry": ("Registry",),
    "schema": ("recipe_schema",),
    "sections": ("DataSection", "Recipe", "Section", "Sections"),
    "workload": ("Workload",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"narrowcast.config.{home}"), name)
    raise AttributeError(f"narrowcast.config has no {name!r}")
