"""Torch optimizers by name, weight decay where it belongs, one kernel where there is one."""

from typing import Any

import torch
from torch import nn

from narrowcast.config.sections import OptimizerSection
from narrowcast.errors import RecipeError

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})
"""Where torch 2.11 and 2.13 have one kernel for all parameters (Adam, AdamW, SGD)."""


def build_optimizer(
    settings: OptimizerSection, model: nn.Module, *, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer that `settings` names, for the parameters of `model` that train.

    Weight decay acts on parameters of two or more dimensions: on a bias or the gain of a norm it
    would only pull the function towards nothing.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise RecipeError("the model has no parameter that trains: every requires_grad is false")
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if params
    ]
    lr, betas, eps = settings.lr, settings.betas, settings.eps
    fused = device.type in FUSED_DEVICES if settings.fused is None else settings.fused
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)
        case "adam":
            return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, fused=fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum, fused=fused)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=lr, momentum=settings.momentum, eps=eps)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=lr)


def moments_of(settings: OptimizerSection) -> int:
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
