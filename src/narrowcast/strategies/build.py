"""From a recipe to the strategy that its run follows."""

from narrowcast.config.sections import Recipe
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.strategy import PLAIN, Strategy
from narrowcast.training.task import Task


def strategy_of(recipe: Recipe, task: Task, prepared: Prepared) -> Strategy:
    """Return what the run of a recipe follows: plain training, unless it asks for more."""
    if not recipe.strategy.is_hybrid:
        return PLAIN
    from narrowcast.strategies.hybrid.strategy import HybridStrategy

    return HybridStrategy(prepared, task, recipe)
