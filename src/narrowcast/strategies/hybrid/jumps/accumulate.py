"""Many small movements, applied at once."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.strategies.hybrid.jumps.access import WeightAccess


@final
class DeltaAccumulator:
    """Sums movements of every weight in fp32, until they are applied as one.

    Working weights of 16 bits are then rounded once, not at every movement. Nothing waits for the
    device. There is no memory before the first movement, nor after a flush.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self.count = 0
        """Movements since the last flush."""

    @torch.no_grad()
    def add(self, deltas: Sequence[Tensor], *, scale: float = 1.0) -> None:
        """Add a movement of every weight, times a scale."""
        if not self._sums:
            self._sums = [torch.zeros_like(delta, dtype=torch.float32) for delta in deltas]
        torch._foreach_add_(self._sums, list(deltas), alpha=scale)
        self.count += 1

    @torch.no_grad()
    def flush(self, access: WeightAccess) -> int:
        """Move the weights by all of it; return how many movements that was."""
        count = self.count
        if count:
            access.write(torch._foreach_add(access.read(), self._sums))
        self.drop()
        return count

    def drop(self) -> None:
        """Forget what was not applied."""
        self._sums, self.count = [], 0

    def bytes(self) -> int:
        """Return what the sums take."""
        return sum(t.nbytes for t in self._sums)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums; the tensors are those held."""
        return {"sums": list(self._sums), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Take up where a saved one stood."""
        self._sums = [t.to(device, copy=True) for t in state["sums"]]
        self.count = int(state["count"])
