"""How much of the target's weights the components leave."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.losses.terms import Loss, Step


@dataclass(frozen=True, kw_only=True)
class Faithfulness(Loss):
    """The mean squared difference between the target's weights and the sums of components."""

    kind: ClassVar[str] = "faithfulness"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the squares of all sites by the number of their weights."""
        return unfaithfulness(step.decomposition)


def unfaithfulness(decomposition: Decomposition) -> Tensor:
    """Return the mean square of what components leave of all weights, for every seed.

    Of the difference itself: the square multiplied out would cancel where components are good.
    """
    deltas = decomposition.deltas()
    squares: Tensor = sum(each.square().sum((1, 2)) for each in deltas)  # type: ignore[assignment]
    return squares / sum(each[0].numel() for each in deltas)
