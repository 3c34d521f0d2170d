"""The model and the batches of a recipe, the same for every contender.

Weights are drawn on the device, with the seed of the recipe: which values they have does not
matter here, that everyone begins with the same ones does. Batches are random tokens of the model's
vocabulary, a few of them, on the device before anything is timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.config.common_sections import LrScheduleSection
from narrowcast.config.sections import Recipe
from narrowcast.errors import RecipeError
from narrowcast.hardware import probe
from narrowcast.training.task import Task
from narrowcast.workloads.lm.model import GPT
from narrowcast.workloads.lm.settings import LmRehearsal
from narrowcast.workloads.lm.task import LanguageModel, build_language_model

POOL = 8
"""Different batches; more would only take memory."""
DEVIATION = 0.02
"""Of the weights, as in GPT-2."""


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """A fresh model on its device, and what it is trained on."""

    recipe: Recipe
    task: Task
    model: GPT
    batches: tuple[tuple[Tensor, Tensor], ...]
    device: torch.device

    @property
    def tokens_a_step(self) -> int:
        """Tokens an optimizer step trains on."""
        return self.task.items(self.batches[0]) * self.recipe.accumulate

    def stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches, over and over."""
        return cycle(self.batches)


class ModelWithLoss(nn.Module):
    """The model and its loss in one module, so that a peer's compiler sees both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, as everybody writes it."""
        logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def device_of(recipe: Recipe) -> torch.device:
    """Return the device the recipe asks for."""
    return torch.device(probe(recipe.device).device)


def shapes_of(recipe: Recipe) -> LanguageModel:
    """Return the task of `recipe` with a model of shapes only."""
    if recipe.workload != "lm":
        raise RecipeError(
            f"workload={recipe.workload}: bench measures language models, e.g. lm/gpt-350m"
        )
    if recipe.section(LmRehearsal).swell:
        raise RecipeError("rehearse.swell is no part of a model that is measured; leave it out")
    return build_language_model(recipe, device=torch.device("meta"))


def set_up(recipe: Recipe) -> Workbench:
    """Build the model and its batches on the recipe's device.

    The learning rate stays what it is: peers have no schedule, and losses are to be compared.
    """
    recipe = recipe.model_copy(update={"lr_schedule": LrScheduleSection()})
    device = device_of(recipe)
    shapes = shapes_of(recipe)
    model = shapes.model.to_empty(device=device)
    model.tie()
    torch.manual_seed(recipe.seed)
    draw_weights(model)
    task = replace(shapes, model=model, device=device).task()
    size = (recipe.batch_size, model.length + 1)
    pool = [torch.randint(model.vocab, size, device=device) for _ in range(POOL)]
    # Contiguous, as a copy from a data loader is.
    batches = tuple((t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in pool)
    return Workbench(recipe=recipe, task=task, model=model, batches=batches, device=device)


@torch.no_grad()
def draw_weights(model: GPT) -> None:
    """Fill an empty model on the device it is on, from torch's global generator."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(std=DEVIATION)
    model.fill_buffers()
