"""Recipes: settings files, words of the command line that win over them, and who set what."""

from narrowcast.config.load import LoadedRecipe, from_resolved, load_recipe
from narrowcast.config.schema import recipe_schema
from narrowcast.config.sections import DataSection, Recipe, Section, Sections
from narrowcast.config.shipped import shipped_recipes

__all__ = [
    "DataSection",
    "LoadedRecipe",
    "Recipe",
    "Section",
    "Sections",
    "from_resolved",
    "load_recipe",
    "recipe_schema",
    "shipped_recipes",
]
