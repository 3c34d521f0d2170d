"""Optimizers like another one: what they do to a gradient, and fresh copies of them."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import UnsupportedError

ADAPTIVE = ("adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adafactor")
"""Optimizers that divide by the root of a second moment, by the name of their class."""
PRIOR_BATCHES = 4
"""Batches that the estimate by rows and columns counts for."""


def is_adaptive(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer divides by second moments; raise for one that is unknown."""
    if optimizer is None:
        return True
    name = type(optimizer).__name__.lower()
    if name in ADAPTIVE:
        return True
    if isinstance(optimizer, torch.optim.SGD):
        return False
    raise UnsupportedError(
        f"tune knows the updates of Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, "
        f"Adafactor and SGD, got {type(optimizer).__name__}. Leave optimizer out to measure the "
        "updates of AdamW."
    )


def learning_rates(optimizer: torch.optim.Optimizer | None) -> dict[int, float]:
    """Return the learning rate of each weight over the largest of them."""
    if optimizer is None:
        return {}
    groups = [(float(group["lr"]), group["params"]) for group in optimizer.param_groups]
    largest = max((rate for rate, _ in groups), default=0.0)
    if largest <= 0:
        return {}
    return {id(weight): rate / largest for rate, weights in groups for weight in weights}


def preconditioner(
    square: Tensor,
    batches: int,
    optimizer: torch.optim.Optimizer | None,
    weight: Tensor,
    *,
    adaptive: bool,
) -> Tensor:
    """Return what the optimizer multiplies a gradient by, but for the learning rate."""
    if not adaptive:
        return torch.ones_like(square)
    state = {} if optimizer is None else optimizer.state.get(weight, {})
    second, step = state.get("exp_avg_sq"), state.get("step")
    group = next(
        (g for g in optimizer.param_groups if any(p is weight for p in g["params"])), {}
    ) if optimizer is not None else {}  # fmt: skip
    eps = group.get("eps", 1e-8)
    eps = eps[0] if isinstance(eps, tuple) else eps
    if isinstance(second, Tensor) and second.shape == square.shape and step is not None:
        decay = group.get("betas", (0.9, 0.999))[1]
        square = second.float() / (1 - decay ** float(step))
    else:
        square = (square * batches + _by_rows(square) * PRIOR_BATCHES) / (batches + PRIOR_BATCHES)
    factor = 1 / (square.sqrt() + (eps or 1e-30))
    return factor.where(square > 0, torch.zeros_like(factor))


def _by_rows(square: Tensor) -> Tensor:
    """Return the squares of a matrix as the product of those of its rows and its columns."""
    if square.dim() < 2:
        return square.mean().expand_as(square)
    flat = square.flatten(1)
    rows, columns, whole = flat.mean(1, keepdim=True), flat.mean(0, keepdim=True), flat.mean()
    return (rows * columns / whole.clamp_min(1e-38)).view_as(square)


def fresh_optimizer(
    model: nn.Module,
    example: torch.optim.Optimizer | None,
    *,
    names: Mapping[int, str] | None = None,
) -> torch.optim.Optimizer:
    """Return a new optimizer with the settings of another one, or AdamW.

    It has the state of the other one, too, unless `names` says how the weights of the other one are
    called in this model.
    """
    if example is None:
        return torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-3)
    own = dict(model.named_parameters())
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        | {"params": [w if names is None else own[names[id(w)]] for w in group["params"]]}
        for group in example.param_groups
    ]
    known = inspect.signature(type(example).__init__).parameters
    settings = {key: value for key, value in example.defaults.items() if key in known}
    make: Any = type(example)
    fresh: torch.optim.Optimizer = make(groups, **settings)
    if example.state and names is None:
        fresh.load_state_dict(copy.deepcopy(example.state_dict()))
    return fresh
