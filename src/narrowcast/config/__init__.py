"""Recipes: settings files, words of the command line that win over them, and who set what.

Names are imported when first used: what a workload is can be asked without pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.config.load import LoadedRecipe, from_resolved, load_recipe
    from narrowcast.config.registry import Registry
    from narrowcast.config.schema import recipe_schema
    from narrowcast.config.sections import DataSection, Recipe, Section, Sections
    from narrowcast.config.workload import Workload

__all__ = [
    "DataSection",
    "LoadedRecipe",
    "Recipe",
    "Registry",
    "Section",
    "Sections",
    "Workload",
    "from_resolved",
    "load_recipe",
    "recipe_schema",
]

_HOMES = {
    "LoadedRecipe": "load",
    "from_resolved": "load",
    "load_recipe": "load",
    "Registry": "registry",
    "recipe_schema": "schema",
    "DataSection": "sections",
    "Recipe": "sections",
    "Section": "sections",
    "Sections": "sections",
    "Workload": "workload",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"narrowcast.config has no {name!r}")
    return getattr(import_module(f"narrowcast.config.{_HOMES[name]}"), name)
