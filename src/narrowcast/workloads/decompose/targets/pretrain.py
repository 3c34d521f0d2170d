"""Trains toy networks, all seeds at once, in the process that decomposes them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn


@final
@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """How a toy network is trained: by AdamW, on batches drawn anew."""

    steps: int
    batch_size: int
    lr: float
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.01


@runtime_checkable
class Trainable(Protocol):
    """Networks of all seeds that can be trained together."""

    def learnt(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        ...

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss of each seed (seeds,) on a batch."""
        ...

    def settle(self) -> None:
        """Bring in order what follows from the parameters that were trained."""
        ...


def pretrain(network: Trainable, draw: Callable[[int], Tensor], how: Pretraining) -> None:
    """Train, drawing a batch of a given size for every step; nothing waits for the device."""
    optimizer = torch.optim.AdamW(
        network.learnt(), lr=how.lr, weight_decay=how.weight_decay, fused=True
    )
    (group,) = optimizer.param_groups
    for step in range(how.steps):
        if how.schedule == "cosine":
            group["lr"] = how.lr * (1 + math.cos(math.pi * step / how.steps)) / 2
        optimizer.zero_grad()
        # The sum: no seed's gradient touches another's.
        network.loss(draw(how.batch_size)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    network.settle()
