"""The model and the batches of a recipe, on the device, the same for every contender."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.config.common_sections import LrScheduleSection
from narrowcast.config.sections import Recipe
from narrowcast.hardware import detect_hardware
from narrowcast.training.data import BatchStream, batch_order
from narrowcast.training.task import Batch, LossParts, Task
from narrowcast.workloads import build_task
from narrowcast.workloads.lm.model import GPT

POOL = 8
"""Number of different batches; more would only take memory."""

Loss: TypeAlias = Callable[[nn.Module, Batch], Tensor | LossParts]


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """A fresh model on its device, and its batches."""

    recipe: Recipe
    task: Task
    batches: tuple[Batch, ...]
    device: torch.device

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def work(self) -> dict[str, float]:
        """Items per optimizer step, by the unit of the task."""
        items = self.task.items(self.batches[0]) * self.recipe.gradient_accumulation_steps
        return {self.task.info.units: float(items)}

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def stream(self) -> Iterator[Batch]:
        return cycle(self.batches)

    def model_with_loss(self) -> "ModelWithLoss":
        """Return the module a peer trains: the model with the usual loss."""
        loss = logits_loss if isinstance(self.model, GPT) else self.task.loss
        return ModelWithLoss(self.model, loss)


class ModelWithLoss(nn.Module):
    """A model and its loss in one module, so that a peer compiles both."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        loss = self._loss(self.model, batch)
        return loss.total if isinstance(loss, LossParts) else loss


def logits_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over all logits of a language model."""
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def recipe_device(recipe: Recipe) -> torch.device:
    """Return the device of a recipe."""
    return torch.device(detect_hardware(recipe.device).device)


def with_policy(recipe: Recipe, policy: str) -> Recipe:
    """Return the recipe with one policy for the whole run."""
    precision = recipe.precision.model_copy(update={"policy": policy, "schedule": ()})
    return recipe.model_copy(update={"precision": precision})


def set_up(recipe: Recipe) -> Workbench:
    """Build the model and its batches; the learning rate is constant, as for peers."""
    recipe = recipe.model_copy(update={"lr_schedule": LrScheduleSection()})
    device = recipe_device(recipe)
    task = build_task(recipe, device=device)
    with BatchStream(
        task.train_data,
        batch_order(len(task.train_data), recipe),
        device=device,
        collate=task.collate,
    ) as stream:
        batches = tuple(islice(stream, POOL))
    return Workbench(recipe=recipe, task=task, batches=batches, device=device)
