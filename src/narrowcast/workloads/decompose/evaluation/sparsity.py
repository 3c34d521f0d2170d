"""How few components are needed: how many at a time, how often each, and how many ever.

Counted on the device, batch after batch; nothing waits before it is read.
"""

from typing import final

import torch
from torch import Tensor


@final
class FiringCounts:
    """What the importances of a site were, over all positions that were looked at."""

    def __init__(
        self, seeds: int, components: int, *, threshold: float, device: torch.device | str
    ) -> None:
        self.threshold = threshold
        self.positions = 0
        # In float64: float32 stops to count at 16 million.
        self._fired, self._sum = (
            torch.zeros(seeds, components, dtype=torch.float64, device=device) for _ in range(2)
        )
        self._largest = torch.zeros(seeds, components, device=device)

    def add(self, importance: Tensor) -> None:
        """Count (seeds, positions, components)."""
        importance = importance.detach()
        self.positions += importance.shape[1]
        self._fired += (importance > self.threshold).sum(dim=1)
        self._sum += importance.sum(dim=1, dtype=torch.float64)
        self._largest = torch.maximum(self._largest, importance.amax(dim=1).float())

    @property
    def density(self) -> Tensor:
        """The share of positions at which each component is above the threshold (seeds, C)."""
        return self._fired / max(self.positions, 1)

    @property
    def mean(self) -> Tensor:
        """The mean importance of each component (seeds, C)."""
        return self._sum / max(self.positions, 1)

    @property
    def largest(self) -> Tensor:
        """The largest importance that each component had (seeds, C)."""
        return self._largest

    @property
    def l0(self) -> Tensor:
        """The mean number of components above the threshold at a position (seeds,)."""
        return self.density.sum(dim=1)

    def alive(self, *, density: float = 0.0) -> Tensor:
        """Return which components were above the threshold at more than a share of positions."""
        return self.density > density
