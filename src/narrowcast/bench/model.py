"""The model and the batches of a recipe, the same for every contender.

A task is built as for a run, and everyone gets the first few of its batches, on the device before
anything is timed. Synthetic text is quicker than that: which weights a model begins with does not
matter here, that everyone begins with the same ones does, so they are drawn on the device, and
batches are random tokens of the model's vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.config.common_sections import LrScheduleSection
from narrowcast.config.sections import Recipe
from narrowcast.hardware import probe
from narrowcast.training.data import BatchStream
from narrowcast.training.task import Batch, LossParts, Task
from narrowcast.workloads import build_task
from narrowcast.workloads.lm.model import GPT
from narrowcast.workloads.lm.settings import LmData

POOL = 8
"""Different batches; more would only take memory."""
DEVIATION = 0.02
"""Of the weights, as in GPT-2."""

Loss: TypeAlias = Callable[[nn.Module, Batch], Tensor | LossParts]


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """A fresh model on its device, and what it is trained on."""

    recipe: Recipe
    task: Task
    batches: tuple[Batch, ...]
    device: torch.device

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.task.model

    @property
    def work(self) -> dict[str, float]:
        """How much an optimizer step trains on, by what the task counts."""
        items = self.task.items(self.batches[0]) * self.recipe.accumulate
        return {self.task.info.units: float(items)}

    def stream(self) -> Iterator[Batch]:
        """Return the batches, over and over."""
        return cycle(self.batches)

    def model_with_loss(self) -> "ModelWithLoss":
        """Return what a peer trains: the model, and its loss as everybody writes it."""
        loss = logits_loss if isinstance(self.model, GPT) else self.task.loss
        return ModelWithLoss(self.model, loss)


class ModelWithLoss(nn.Module):
    """A model and its loss in one module, so that a peer's compiler sees both."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss."""
        loss = self._loss(self.model, batch)
        return loss.total if isinstance(loss, LossParts) else loss


def logits_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a language model as everybody writes it: of all logits."""
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def device_of(recipe: Recipe) -> torch.device:
    """Return the device the recipe asks for."""
    return torch.device(probe(recipe.device).device)


def shapes_of(recipe: Recipe) -> Task:
    """Return the task of `recipe` with a model of shapes only."""
    return build_task(recipe, device=torch.device("meta"))


def in_policy(recipe: Recipe, policy: str) -> Recipe:
    """Return a recipe that holds one policy throughout."""
    precision = recipe.precision.model_copy(update={"policy": policy, "schedule": ()})
    return recipe.model_copy(update={"precision": precision})


def set_up(recipe: Recipe) -> Workbench:
    """Build the model and its batches on the recipe's device.

    The learning rate stays what it is: peers have no schedule, and losses are to be compared.
    """
    recipe = recipe.model_copy(update={"lr_schedule": LrScheduleSection()})
    if isinstance(recipe.data, LmData) and recipe.data.synthetic:
        return _with_random_tokens(recipe)
    device = device_of(recipe)
    task = build_task(recipe, device=device)
    with BatchStream(
        task.train_data,
        recipe.batch_size,
        seed=recipe.seed,
        device=device,
        collate=task.collate,
    ) as stream:
        batches = tuple(islice(stream, POOL))
    return Workbench(recipe=recipe, task=task, batches=batches, device=device)


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model of shapes only its memory, with weights that were one still one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, its_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, its_name))
    return model


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Fill the weights of a model on the device they are on, from torch's global generator."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(std=DEVIATION)


def _with_random_tokens(recipe: Recipe) -> Workbench:
    device, shapes = device_of(recipe), shapes_of(recipe)
    model = on_device(shapes.model, device)
    assert isinstance(model, GPT)
    torch.manual_seed(recipe.seed)
    draw_weights(model)
    model.fill_buffers()
    size = (recipe.batch_size, model.length + 1)
    pool = [torch.randint(model.vocab, size, device=device) for _ in range(POOL)]
    # Contiguous, as a copy from a data loader is.
    batches = tuple((t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in pool)
    data = _InTurn(batches, recipe.batch_size)
    task = replace(shapes, model=model, train_data=data)
    return Workbench(recipe=recipe, task=task, batches=batches, device=device)


class _InTurn:
    """The batches that everybody has, in their order, as a run's data: on the host."""

    def __init__(self, batches: tuple[tuple[Tensor, ...], ...], size: int) -> None:
        self._size = size
        self._batches = cycle([tuple(t.cpu() for t in batch) for batch in batches])

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, indices: list[int]) -> Batch:
        return next(self._batches)
