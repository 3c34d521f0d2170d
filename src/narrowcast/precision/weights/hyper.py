"""The settings of an optimizer's group as the one-pass step reads them."""

from typing import Any

import torch

from narrowcast.kernels.adamw.twin import Hyper


def group_hyper(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Hyper:
    """Return what decides the next step of a group's weights."""
    return Hyper(
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)),
    )
