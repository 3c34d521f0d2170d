"""Averages of the weights with several half-lives; training does not depend on them.

Under a high learning rate, an average is close to where the weights would be after the rate has
fallen. The best half-life is not known in advance, so there are a few, and an evaluation selects
one. They are updated every tenth of the shortest half-life, which costs a tenth of every step and
changes little.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.nested import copy_tensors
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.weights.master import in_buckets

SMALL = 2**16
"""Weights with fewer elements are updated together, because a launch for each takes longer."""
UPDATES_PER_HALF_LIFE = 10
"""With ten samples per half-life, an average differs from that of all steps by less than noise."""


def steps_between(half_lives: Sequence[float]) -> int:
    """Return the steps between two updates for these half-lives, in steps."""
    return max(1, int(min(half_lives, default=1) / UPDATES_PER_HALF_LIFE))


@final
class AverageBank:
    """fp32 averages of each trained weight, one set per half-life."""

    def __init__(
        self, prepared: Prepared, half_lives: Sequence[float], *, every: int | None = None
    ) -> None:
        """`half_lives` and `every` are in steps; by default `every` is a tenth of the shortest."""
        if any(not half_life > 0 for half_life in half_lives):
            raise ConfigError(
                f"half_lives must be numbers of steps above 0, got {list(half_lives)}."
            )
        self._weights = prepared.engine.weights
        self._parameters = [p for p in self._weights.all if p.requires_grad]
        self._places = {p: i for i, p in enumerate(self._parameters)}
        self.every = steps_between(half_lives) if every is None else every
        """Steps between two updates."""
        self.half_lives = tuple(half_lives)
        self._updates = 0
        self._averages = [
            [torch.zeros_like(p.detach(), dtype=torch.float32) for p in self._parameters]
            for _ in half_lives
        ]

    @property
    def is_filled(self) -> bool:
        """Whether the averages have been updated."""
        return self._updates > 0

    def bytes(self) -> int:
        """Return the size of all averages."""
        return sum(a.numel() * a.element_size() for each in self._averages for a in each)

    def of(self, number: int, weight: nn.Parameter) -> Tensor | None:
        """Return an average of a weight; None if the weight is not trained."""
        index = self._places.get(weight)
        return None if index is None else self._averages[number][index]

    @torch.no_grad()
    def update(self, *, applied: Tensor | None = None) -> None:
        """Move the averages towards the weights, unless the device flag `applied` is false.

        At first an average is the plain mean of all updates, so that a long half-life does not hold
        on to the initial weights. Does not synchronise. Needs fp32 copies of some weights at a
        time.
        """
        if not self.half_lives:
            return
        self._updates += 1
        moves = 1.0 if applied is None else applied.to(torch.float32)
        for bucket in in_buckets(range(len(self._parameters)), self._parameters):
            values = [self._weights.full(self._parameters[i]) for i in bucket]
            local = [local_part(value).float() for value in values]
            for half_life, averages in zip(self.half_lives, self._averages, strict=True):
                share = max(1 - 0.5 ** (self.every / half_life), 1 / self._updates)
                these = [local_part(averages[i]) for i in bucket]
                _move(these, local, share * moves)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of updates."""
        return {"updates": self._updates, "averages": self._averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`."""
        copy_tensors(self._averages, state["averages"])
        self._updates = int(state["updates"])


def _move(averages: Sequence[Tensor], weights: Sequence[Tensor], share: float | Tensor) -> None:
    """Interpolate averages towards weights; does not synchronise."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for average, weight in zip(averages, weights, strict=True):
        if average.numel() < SMALL:
            small[0].append(average)
            small[1].append(weight)
        else:
            average.lerp_(weight, share)  # one pass over memory, where lists take three
    if small[0]:
        way = torch._foreach_sub(small[1], small[0])
        torch._foreach_mul_(way, share)
        torch._foreach_add_(small[0], way)
