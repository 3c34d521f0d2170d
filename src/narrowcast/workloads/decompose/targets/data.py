"""What toy networks are trained and decomposed on: features of which few are there at a time.

Drawn on the device that uses them, so no loader is needed, and a captured step draws anew each time
it is replayed.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

PROBE = 0.75
"""The size of the one feature that a network is asked about: inside every range, off its ends."""


@final
@dataclass(frozen=True, kw_only=True)
class SparseFeatures:
    """Features that are each there with one probability, and then uniform over a range."""

    features: int
    probability: float
    low: float = 0.0
    high: float = 1.0

    def draw(
        self,
        seeds: int,
        batch: int,
        *,
        device: torch.device | str,
        generator: Generator | None = None,
    ) -> Tensor:
        """Return (seeds, batch, features) from the generator, or from the device's own."""
        shape = (seeds, batch, self.features)
        # One draw decides both: whether it is below the probability, and where below.
        share = torch.rand(shape, device=device, generator=generator).div_(self.probability)
        present = share < 1
        if (self.low, self.high) != (0.0, 1.0):
            share = share.mul_(self.high - self.low).add_(self.low)
        return share.mul_(present)

    def probe(self, *, device: torch.device | str) -> Tensor:
        """Return (features, features): each feature alone, at the size that is asked about."""
        return PROBE * torch.eye(self.features, device=device)
