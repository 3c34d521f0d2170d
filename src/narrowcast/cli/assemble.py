"""From a recipe to a model that is ready to train; all that can be refused is refused here."""

from dataclasses import dataclass

import torch

from narrowcast.config import Recipe
from narrowcast.config.sections import OptimizerSection
from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Hardware, probe
from narrowcast.precision.plan import Plan, plan
from narrowcast.precision.prepare import Prepared
from narrowcast.report.phrases import size
from narrowcast.training.data import Order
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.task import Task
from narrowcast.workloads import build_task


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """Everything a run needs but its folder."""

    task: Task
    prepared: Prepared


def assemble(recipe: Recipe) -> Assembled:
    """Build what `recipe` asks for on the device it asks for, or say why that cannot be."""
    hardware = probe(recipe.device)
    choices = planned(recipe, hardware)
    _require_memory(choices)
    task = build_task(recipe, device=torch.device(hardware.device))
    # The trainer would find a batch that is too large only once the run has begun.
    Order(samples=len(task.train_data), batch_size=recipe.batch_size, seed=recipe.seed)
    prepared = prepare_recipe(recipe, task.model, choices=choices)
    return Assembled(task=task, prepared=prepared)


def planned(recipe: Recipe, hardware: Hardware) -> Plan:
    """Plan the model of `recipe` from its shapes alone: no weight is allocated, no data read."""
    task = build_task(recipe, device=torch.device("meta"))
    return plan(
        task.model,
        recipe.precision.policy,
        hardware=hardware,
        overrides=recipe.precision.overrides,
        emulate=recipe.precision.emulate,
        moments=_moments(recipe.optimizer),
        tokens=task.rows,
        only_faster=recipe.precision.only_faster,
    )


def _moments(settings: OptimizerSection) -> int:
    """Return how many numbers torch's optimizer keeps for each weight."""
    with_momentum = int(settings.momentum > 0)
    match settings.name:
        case "adamw" | "adam":
            return 2
        case "sgd":
            return with_momentum
        case "rmsprop":
            return 1 + with_momentum
        case "adafactor":
            return 0  # a row and a column for each matrix: next to nothing


def _require_memory(choices: Plan) -> None:
    """Refuse a model whose weights and optimizer alone are larger than the device."""
    hardware, needed = choices.hardware, sum(choices.bytes.values())
    if needed > hardware.memory_bytes:
        raise UnsupportedError(
            f"weights, gradients and optimizer take {size(needed)}, and {hardware.name} "
            f"({hardware.device}) has {size(hardware.memory_bytes)}; choose a smaller model, or "
            "keep fewer bytes a weight, e.g. precision.policy=bf16-pure"
        )
