"""The plain run beside a hybrid one: the same recipe without its strategy, trained first.

It is told as records of step 0, so that a run that is resumed has them, and no step is counted
twice. Nothing of it is left but these.
"""

from collections.abc import Generator

from narrowcast.config import Recipe
from narrowcast.runner.assemble import assemble
from narrowcast.runs import EvalRecord, Record, StepRecord, StrategyRecord

EVENT = "baseline"


def plain_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe without its strategy."""
    plain = recipe.strategy.model_copy(update={"enabled": False})
    return recipe.model_copy(update={"strategy": plain, "trackers": ()})


def with_baseline(recipe: Recipe, records: Generator[Record]) -> Generator[Record]:
    """Yield how the plain run goes, at each of its evaluations, and then `records`."""
    plain, seconds = plain_recipe(recipe), 0.0
    assembled = assemble(plain)
    for record in assembled.train(plain, folder=None):
        match record:
            case StepRecord():
                seconds += record.seconds
            case EvalRecord():
                yield StrategyRecord(
                    step=0,
                    phase="warmup",
                    event=EVENT,
                    what="plain training",
                    why="to compare with",
                    values={"step": float(record.step), **record.metrics},
                    seconds=seconds,
                )
            case _:
                pass
    del assembled  # its memory is the hybrid run's now
    yield from records
