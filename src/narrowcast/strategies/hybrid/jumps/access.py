"""What a jump needs of a run's weights: their full values, and a way back that is exact."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class ExactWeights:
    """Copies of all that holds the weights, as it is kept: opaque to whoever did not take them."""

    tensors: tuple[Tensor, ...]
    moments: tuple[Tensor, ...] = ()
    """The optimizer's state, where it was asked for."""

    def bytes(self) -> int:
        """Return what the copies take."""
        return sum(t.nbytes for t in (*self.tensors, *self.moments))


class WeightAccess(Protocol):
    """The weights of a run, in one order, with their names; nothing here waits for the device."""

    @property
    def names(self) -> Sequence[str]:
        """The name of each weight."""

    def read(self) -> list[Tensor]:
        """Return every weight in fp32 with every digit kept of it, to be read at once.

        A weight kept in fp32 is returned itself: it is neither to be written to nor to be held.
        """

    def write(self, values: Sequence[Tensor]) -> None:
        """Give every weight an fp32 value, as exactly as the formats it is kept in allow."""

    def snapshot(self, *, with_moments: bool = False) -> ExactWeights:
        """Return copies of the bits of all that holds the weights, and of the moments if asked."""

    def restore(self, exact: ExactWeights) -> None:
        """Put back what `snapshot` copied, bit for bit and at the same addresses."""

    def refuse_reset(self) -> None:
        """Raise what `reset_moments` would raise; change nothing."""

    def reset_moments(self) -> None:
        """Let the optimizer begin anew: moments and their counts are zero."""

    def aside(self) -> AbstractContextManager[None]:
        """Leave no trace of passes inside the block: in buffers, gradients or random numbers."""
