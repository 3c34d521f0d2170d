"""What a classifier predicts with: both strands of the network, and a linear model beside it."""

from typing import TypeAlias, final

from torch import Tensor, nn

from narrowcast.workloads.genomics.data.examples import Batch
from narrowcast.workloads.genomics.models.linear import Linear
from narrowcast.workloads.genomics.models.model import Network, reversed_places

Mix: TypeAlias = tuple[float, float]
"""Weights of the outputs of the network and of the linear model."""


def other_strand(tokens: Tensor, mask: Tensor, complement: Tensor) -> Tensor:
    """Return the reverse complement of each row; padding stays at its end."""
    return complement[tokens.gather(1, reversed_places(tokens, mask))]


@final
class Combined(nn.Module):
    """A trained network with its linear model."""

    def __init__(
        self, network: Network, *, linear: Linear | None, mix: Mix, complement: Tensor | None
    ) -> None:
        super().__init__()
        self.network, self.linear, self.mix = network, linear, mix
        self.register_buffer("complement", complement, persistent=False)
        self.complement: Tensor | None

    def forward(self, batch: Batch) -> Tensor:
        result = of_strands(self.network, batch, self.complement)
        if self.linear is None:
            return result
        out: Tensor = self.mix[0] * result.float() + self.mix[1] * self.linear(letter_tokens(batch))
        return out


def letter_tokens(batch: Batch) -> Tensor:
    """Return the tokens of single letters."""
    return batch.get("letters", batch["tokens"])


def of_strands(network: nn.Module, batch: Batch, complement: Tensor | None) -> Tensor:
    """Return the outputs of a network; the mean over both strands if they count the same."""
    tokens, mask = batch["tokens"], batch["mask"]
    result: Tensor = network(tokens, mask, batch.get("alternative"))
    if "opposite" in batch:
        other: Tensor = network(batch["opposite"], batch["opposite_mask"], None)
    elif complement is not None:
        other = network(other_strand(tokens, mask, complement), mask, None)
    else:
        return result
    return (result + other) / 2
