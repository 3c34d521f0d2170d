"""Torch optimizers by name, fused where torch has one kernel for all parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from narrowcast.config.common_sections import OptimizerSection
from narrowcast.errors import ConfigError
from narrowcast.precision.weights.multi_optimizer import SideBySide
from narrowcast.training.parameter_groups import as_torch_groups
from narrowcast.training.task import ParameterGroup

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})
"""Where torch 2.11 and 2.13 have fused kernels (Adam, AdamW, SGD)."""


def build_optimizer(
    settings: OptimizerSection,
    model: nn.Module,
    *,
    device: torch.device,
    groups: Sequence[ParameterGroup] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of `settings` for the trained parameters, or several as one."""
    if groups is None:
        groups = [ParameterGroup(parameters=list(model.parameters()))]
    by_settings: dict[OptimizerSection, list[dict[str, Any]]] = {}
    for group in groups:
        own = group.optimizer or settings
        if matches := as_torch_groups(group, own):
            by_settings.setdefault(own, []).extend(matches)
    if not by_settings:
        raise ConfigError(
            "The model has no trainable parameter: requires_grad is False for all of them. Set "
            "requires_grad=True for those to train."
        )
    # The recipe's first: its learning rate is the one that records tell.
    ordered = sorted(by_settings.items(), key=lambda item: item[0] != settings)
    built = [_built(own, result, device=device) for own, result in ordered]
    return built[0] if len(built) == 1 else SideBySide(built)


def _built(
    settings: OptimizerSection, groups: list[dict[str, Any]], *, device: torch.device
) -> torch.optim.Optimizer:
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


def moment_count(settings: OptimizerSection) -> int:
    """Return how many numbers torch's optimizer stores per weight."""
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
