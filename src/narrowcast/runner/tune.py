"""`nc.tune_recipe`: tune the policy of a recipe on its own data and optimizer."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from narrowcast.config import LoadedRecipe
from narrowcast.errors import ConfigError
from narrowcast.runner.assemble import check_settings
from narrowcast.training.data import batch_order, make_batches
from narrowcast.training.optimizers import build_optimizer, get_groups
from narrowcast.training.phase_plans import recipe_execution
from narrowcast.training.task import Task
from narrowcast.tuning.budget import Budget
from narrowcast.tuning.measuring import Progress
from narrowcast.tuning.result import TuneResult
from narrowcast.tuning.tune import tune
from narrowcast.workloads import build_task, load_recipe

MEASURED_ROWS = 4096
"""Rows of the batches that measure updates, at most: in emulated formats large ones take long."""


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
    small = max(settings.batch_size * MEASURED_ROWS // task.gemm_rows, 1)
    fewer = settings.model_copy(update={"batch_size": min(small, settings.batch_size)})
    samples = len(task.train_data)
    with (
        make_batches(task, fewer, batch_order(samples, fewer), start=0, device=device) as measured,
        make_batches(
            task, settings, batch_order(samples, settings), start=0, device=device
        ) as stream,
    ):
        title = f"narrowcast tune {settings.name}"
        if hardware is not None:
            title += f" hardware={hardware}"
        result = tune(
            task.model,
            itertools.chain(
                _as_steps(task, itertools.islice(measured, measure_batches)),
                _as_steps(task, stream),
            ),
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


def _as_steps(task: Task, batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        yield task.as_one_step([batch])[0]
