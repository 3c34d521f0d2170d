"""Causal importance: small networks that say how much each component matters at each position."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ParallelLinear(nn.Module):
    """A linear layer of its own for each of C components: (…, C, d_in) to (…, C, d_out)."""

    def __init__(self, components: int, d_in: int, d_out: int, *, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(components, d_in, d_out) * gain / d_in**0.5)
        self.bias = nn.Parameter(torch.zeros(components, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...ci,cio->...co", x, self.weight) + self.bias


class ScalarMLP(nn.Module):
    """`mlp`: a network a component, of the component's own activation."""

    reads = "activations"

    def __init__(self, d_in: int, components: int, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [1, *hidden]
        layers: list[nn.Module] = []
        for one, two in pairwise(sizes):
            layers += [ParallelLinear(components, one, two, gain=2**0.5), nn.GELU()]
        self.layers = nn.Sequential(*layers, ParallelLinear(components, sizes[-1], 1, gain=1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[..., None])[..., 0]


class SharedMLP(nn.Module):
    """`shared_mlp`: one network for all components of a module, of the module's input."""

    reads = "inputs"

    def __init__(self, d_in: int, components: int, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [d_in, *hidden]
        layers: list[nn.Module] = []
        for one, two in pairwise(sizes):
            layers += [_linear(one, two, gain=2**0.5), nn.GELU()]
        self.layers = nn.Sequential(*layers, _linear(sizes[-1], components, gain=1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


KINDS = {"mlp": ScalarMLP, "shared_mlp": SharedMLP}


def _linear(d_in: int, d_out: int, *, gain: float) -> nn.Linear:
    made = nn.Linear(d_in, d_out)
    nn.init.normal_(made.weight, std=gain / d_in**0.5)
    nn.init.zeros_(made.bias)
    return made


class _LowerLeaky(torch.autograd.Function):
    """min(max(z, 0), 1), whose gradient leaks below 0 where it would raise z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        rising = torch.where(grad < 0, 0.01 * grad, torch.zeros_like(grad))
        return torch.where(z <= 0, rising, torch.where(z <= 1, grad, torch.zeros_like(grad)))


def lower_leaky(z: Tensor) -> Tensor:
    """Return what masks are made from."""
    return _LowerLeaky.apply(z)


def upper_leaky(z: Tensor) -> Tensor:
    """Return what is to be small."""
    return torch.where(z > 1, 1 + 0.01 * (z - 1), F.relu(z))
