"""Torch optimizers by name, fused where torch has one kernel for all parameters."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from narrowcast.config.common_sections import OptimizerSection
from narrowcast.errors import ConfigError
from narrowcast.precision.weights.multi_optimizer import SideBySide
from narrowcast.training.task import ParameterGroup, Task

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
    # The recipe's optimizer first: records report its learning rate.
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


FROZEN_UNTIL = "frozen_until"
"""Key in a torch parameter group: share of the run during which the group is frozen."""
SHOWN = 3
"""Names that a message lists."""


def get_groups(task: Task) -> Sequence[ParameterGroup] | None:
    """Check the parameter groups of a task, and freeze those with `frozen`; None without groups."""
    if task.parameter_groups is None:
        return None
    groups = list(task.parameter_groups(task.model))
    if strange := [group for group in groups if not isinstance(group, ParameterGroup)]:
        raise ConfigError(
            "parameter_groups must return a list of narrowcast.ParameterGroup, got a "
            f"{type(strange[0]).__name__} in it. Write ParameterGroup(parameters=…)."
        )
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    grouped = [parameter for group in groups for parameter in group.parameters]
    if strangers := [p for p in grouped if p not in names]:
        shapes = [f"one of shape {tuple(p.shape)}" for p in strangers]
        raise ConfigError(
            f"Parameter groups must hold parameters of the model, got {_listed(shapes)}. Leave out "
            "parameters that the model does not have."
        )
    if twice := [names[p] for p, count in Counter(grouped).items() if count > 1]:
        raise ConfigError(
            f"A parameter must be in one parameter group, got {_listed(twice)} in two. Leave it "
            "out of one of them."
        )
    learning = set(grouped)
    if missing := [n for p, n in names.items() if p.requires_grad and p not in learning]:
        raise ConfigError(
            f"Every trainable parameter must be in a parameter group, got {_listed(missing)} in "
            "none. Add it to a group, or to one with frozen=True."
        )
    for group in groups:
        if group.frozen:
            for parameter in group.parameters:
                parameter.requires_grad_(False)
    return groups


def layerwise_decay(stages: Sequence[nn.Module], *, decay: float) -> list[ParameterGroup]:
    """Return one group per stage, from input to output, for layer-wise learning rate decay.

    A weight shared by two stages belongs to the first.
    """
    groups, seen = list[ParameterGroup](), set[nn.Parameter]()
    for depth, stage in enumerate(stages):
        fresh = [p for p in stage.parameters() if p not in seen]
        seen.update(fresh)
        factor = decay ** (len(stages) - 1 - depth)
        groups.append(ParameterGroup(parameters=fresh, lr_factor=factor))
    return groups


def as_torch_groups(group: ParameterGroup, settings: OptimizerSection) -> list[dict[str, Any]]:
    """Return torch parameter groups; by default biases and norm gains have no weight decay."""
    trained = [p for p in group.parameters if p.requires_grad]
    lr = settings.lr if group.lr is None else group.lr
    own = group.weight_decay
    halves = (
        ([p for p in trained if p.ndim >= 2], settings.weight_decay if own is None else own),
        ([p for p in trained if p.ndim < 2], 0.0 if own is None else own),
    )
    own_way = {"lr": lr * group.lr_factor, FROZEN_UNTIL: group.frozen_until}
    return [
        {"params": params, "weight_decay": decay, **own_way} for params, decay in halves if params
    ]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
