"""`nc.tune_recipe`: tune the policy of a recipe on its own data and optimizer."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from narrowcast.config import LoadedRecipe
from narrowcast.errors import ConfigError
from narrowcast.runner.assemble import check_settings
from narrowcast.training.data import BatchStream, batch_order, make_batches
from narrowcast.training.optimizers import build_optimizer, get_groups
from narrowcast.training.phase_plans import recipe_execution
from narrowcast.training.task import Task
from narrowcast.tuning.budget import Budget
from narrowcast.tuning.measuring import Progress
from narrowcast.tuning.result import TuneResult
from narrowcast.tuning.tune import tune
from narrowcast.workloads import build_task, load_recipe


def tune_recipe(
    recipe: str | Path | LoadedRecipe,
    overrides: Iterable[str] = (),
    *,
    budget: str | Budget | Iterable[str] = "loss=1%",
    hardware: str | None = None,
    measure_batches: int = 3,
    check_steps: int = 40,
    progress: Progress | None = None,
) -> TuneResult:
    """Find the fastest policy for a recipe under a budget, on its model, data and optimizer.

    The recipe's own precision settings do not matter. See `tune` for the other arguments.

    Args:
        recipe: A shipped name, a YAML file, or the result of `load_recipe`.
        overrides: KEY=VALUE as on the command line.
        budget: Limits such as `loss=0.5%, memory=20GiB`.
        hardware: The GPU to tune for, such as `h200`. None: the recipe's device.
        measure_batches: Batches that measure updates.
        check_steps: Steps of the check run. 0: no check.
        progress: Called with a line of text as the search goes on. None: a terminal shows it.

    Returns:
        The policy with its reasons.
    """
    loaded = recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe, overrides)
    limits = Budget.parse(budget)
    settings = loaded.recipe
    if settings.parallel.ranks not in (None, 1):
        raise ConfigError(
            f"tune uses one process, got parallel.ranks={settings.parallel.ranks}. Leave "
            "parallel.ranks out; the policy is the same for any number of ranks."
        )
    device = torch.device(check_settings(settings).device)
    task = build_task(settings, device=device)
    optimizer = build_optimizer(
        settings.optimizer, task.model, device=device, groups=get_groups(task)
    )
    order = batch_order(len(task.train_data), settings)
    with make_batches(task, settings, order, start=0, device=device) as stream:
        title = f"narrowcast tune {settings.name}"
        if hardware is not None:
            title += f" hardware={hardware}"
        result = tune(
            task.model,
            _prepared_batches(task, stream),
            task.loss,
            budget=limits,
            optimizer=optimizer,
            hardware=hardware,
            gemm_rows=task.gemm_rows,
            execution=recipe_execution(settings),
            measure_batches=measure_batches,
            check_steps=check_steps,
            clip_norm=settings.clip_norm,
            seed=settings.seed,
            progress=progress,
        )
    return result.titled(f"{title} --budget {str(limits).replace(', ', ',')}")


def _prepared_batches(task: Task, stream: BatchStream) -> Iterator[Any]:
    for batch in stream:
        yield task.as_one_step([batch])[0]
