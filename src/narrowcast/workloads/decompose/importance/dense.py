"""Layers that several decompositions, or all components of a site, have each of their own."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.decompose.components.scalar_mlp import scalar_mlp

HIDDEN_GAIN = math.sqrt(2)
"""Of a layer that a nonlinearity follows; what sees the logits has gain 1."""


class SeededDense(nn.Module):
    """A linear layer for every seed."""

    def __init__(self, seeds: int, d_in: int, d_out: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(seeds, d_in, d_out) * (gain / math.sqrt(d_in)))
        self.bias = nn.Parameter(torch.zeros(seeds, 1, d_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map (seeds, rows, d_in) to (seeds, rows, d_out)."""
        return torch.baddbmm(self.bias, x, self.weight)


class SharedMLP(nn.Module):
    """An MLP for every seed that sees a whole vector and tells all its outputs at once."""

    def __init__(self, seeds: int, d_in: int, hidden: Sequence[int], d_out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SeededDense(seeds, wide, narrow, gain=HIDDEN_GAIN)
            for wide, narrow in pairwise((d_in, *hidden))
        )
        self.last = SeededDense(seeds, (d_in, *hidden)[-1], d_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map (seeds, rows, d_in) to (seeds, rows, d_out)."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        out: Tensor = self.last(x)
        return out


class ComponentMLP(nn.Module):
    """An MLP for every component, from the same vector of `d_in` or from a number of its own.

    `d_in` None: each component sees its own activation. The first layer of those that share a
    vector is one product for all components together.
    """

    def __init__(
        self, seeds: int, d_in: int | None, hidden: Sequence[int], components: int
    ) -> None:
        super().__init__()
        self.shares, fan, first = d_in is not None, d_in or 1, hidden[0]
        shape = (seeds, fan, components * first) if self.shares else (seeds, components, first)
        self.first = nn.Parameter(torch.randn(shape) * (HIDDEN_GAIN / math.sqrt(fan)))
        self.first_bias = nn.Parameter(torch.zeros(seeds, components, first))
        self.middle = nn.ParameterList(
            torch.randn(seeds, components, wide, narrow) * (HIDDEN_GAIN / math.sqrt(wide))
            for wide, narrow in pairwise(hidden)
        )
        self.middle_biases = nn.ParameterList(
            torch.zeros(seeds, components, narrow) for narrow in hidden[1:]
        )
        self.last = nn.Parameter(torch.randn(seeds, components, hidden[-1]) / math.sqrt(hidden[-1]))
        self.last_bias = nn.Parameter(torch.zeros(seeds, components))

    def forward(self, x: Tensor) -> Tensor:
        """Map (seeds, rows, d_in or components) to (seeds, rows, components)."""
        if not self.shares and not len(self.middle):
            return scalar_mlp(x, self.first, self.first_bias, self.last, self.last_bias)
        if self.shares:
            bias = self.first_bias.flatten(1)[:, None]
            x = F.gelu(torch.baddbmm(bias, x, self.first)).unflatten(-1, self.first_bias.shape[1:])
        else:
            x = F.gelu(x[..., None] * self.first[:, None] + self.first_bias[:, None])
        for weight, bias in zip(self.middle, self.middle_biases, strict=True):
            x = F.gelu(torch.einsum("snci,scij->sncj", x, weight) + bias[:, None])
        return (x * self.last[:, None]).sum(-1) + self.last_bias[:, None]
