"""What a classifier predicts with: both strands of the network, and a linear model beside it."""

from typing import TypeAlias, final

from torch import Tensor, nn

from narrowcast.workloads.genomics.models.linear import Linear
from narrowcast.workloads.genomics.models.model import Network, reversed_places

Mix: TypeAlias = tuple[float, float]
"""Weights of the outputs of the network and of the linear model."""


def other_strand(tokens: Tensor, mask: Tensor, complement: Tensor) -> Tensor:
    """Return the reverse complement of each row; padding stays at its end."""
    return complement[tokens.gather(1, reversed_places(tokens, mask))]


@final
class Combined(nn.Module):
    """A trained network with its linear model, called like the network."""

    def __init__(
        self, network: Network, *, linear: Linear | None, mix: Mix, complement: Tensor | None
    ) -> None:
        super().__init__()
        self.network, self.linear, self.mix = network, linear, mix
        self.register_buffer("complement", complement, persistent=False)
        self.complement: Tensor | None

    def forward(self, tokens: Tensor, mask: Tensor, alternative: Tensor | None = None) -> Tensor:
        result = of_strands(self.network, tokens, mask, self.complement, alternative)
        if self.linear is None:
            return result
        out: Tensor = self.mix[0] * result.float() + self.mix[1] * self.linear(tokens)
        return out


def of_strands(
    network: nn.Module,
    tokens: Tensor,
    mask: Tensor,
    complement: Tensor | None,
    alternative: Tensor | None = None,
) -> Tensor:
    """Return the outputs of a network; with complements, the mean over both strands."""
    result: Tensor = network(tokens, mask, alternative)
    if complement is None:
        return result
    other: Tensor = network(other_strand(tokens, mask, complement), mask, None)
    return (result + other) / 2
