"""The tensors of a recipe's model and gradients for them, without a model that computes anything.

`bytes_per_parameter` of a contender is what one pass over its own formats would move: each tensor
it keeps read once and written once, the gradient read once more for its norm. What it moves beyond
that shows as a smaller share of the device's copy bandwidth.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.bench.measure.timing import Case, Step, Trial
from narrowcast.bench.model import device_of, draw_weights, on_device, shapes_of
from narrowcast.config.sections import Recipe

GRADIENT_DEVIATION = 1e-3
"""Large enough that 400M of them have a norm above 1, so that clipping has something to do."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's weights on the device, and the recipe they are updated by."""

    recipe: Recipe
    model: nn.Module
    device: torch.device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All weights; tied ones once."""
        return list(self.model.parameters())

    @property
    def count(self) -> int:
        """How many numbers they are."""
        return sum(p.numel() for p in self.parameters)

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep them in 16 bits."""
        for parameter in self.parameters:
            parameter.data = parameter.data.to(dtype)

    def settings(self) -> dict[str, object]:
        """Return the recipe's settings of AdamW, as every AdamW takes them."""
        asked = self.recipe.optimizer
        return {
            "lr": asked.lr,
            "betas": asked.betas,
            "eps": asked.eps,
            "weight_decay": asked.weight_decay,
        }


def draw(recipe: Recipe) -> Weights:
    """Draw the weights of the recipe's model on its device."""
    device = device_of(recipe)
    model = on_device(shapes_of(recipe).model, device)
    torch.manual_seed(recipe.seed)
    draw_weights(model)
    return Weights(recipe=recipe, model=model, device=device)


def gradients_for(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Draw a gradient for each parameter, in its format."""
    return [torch.randn_like(p).mul_(GRADIENT_DEVIATION) for p in parameters]


def trial_of(weights: Weights, update: Step, *, bytes_per_parameter: float, **about: Any) -> Trial:
    """Return a trial in which every parameter has its gradient before each update.

    Gradients are handed over, not copied: whoever scales them in place scales them further at the
    next step, which takes as long.
    """
    parameters = weights.parameters
    gradients = gradients_for(parameters)

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        update()

    work = {"bytes": bytes_per_parameter * weights.count}
    return Trial(
        cases={"step": Case(open=lambda: step, work=work, part_of_step=True)},
        about={"parameters": weights.count, "bytes_per_parameter": bytes_per_parameter, **about},
    )
