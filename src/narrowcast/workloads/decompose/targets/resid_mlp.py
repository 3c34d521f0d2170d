"""Residual networks that compute x + relu(x) of more features than they have neurons.

    r = x W_E;  r += mlp_out(relu(mlp_in(r))), layer by layer;  y = r W_E^T

The rows of W_E are fixed random unit vectors, so features overlap a little in the residual stream.
"""

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Generator, Tensor, nn

from narrowcast.workloads.decompose.targets.toy import (
    Pretraining,
    SeededLinear,
    SparseFeatures,
    ToyPlan,
    Truth,
    check_features,
)

WIDTH = 1000
SHAPES = {1: (100, 50, 100, 1000), 2: (100, 25, 400, 1000), 3: (102, 17, 500, 10_000)}
"""By layers: features, neurons of each layer, components of each site, steps of training."""
TOLERANCE = 0.5
"""Tolerance around the wanted 1.5 of a feature of 0.75; trained networks give 1.1 to 1.3."""


@final
class ResidualLayer(nn.Module):
    """What one layer adds to the residual stream."""

    def __init__(self, seeds: int, width: int, neurons: int, *, device: torch.device) -> None:
        super().__init__()
        self.mlp_in = SeededLinear(seeds, width, neurons, device=device)
        self.mlp_out = SeededLinear(seeds, neurons, width, device=device)

    def forward(self, residual: Tensor) -> Tensor:
        added: Tensor = self.mlp_out(torch.relu(self.mlp_in(residual)))
        return added


@final
class ResidMLP(nn.Module):
    """One network for each seed, each with an embedding of its own."""

    embedding: Tensor

    def __init__(
        self,
        features: int,
        width: int,
        neurons: int,
        layers: int,
        *,
        seeds: int,
        generator: Generator,
    ) -> None:
        super().__init__()
        device = generator.device
        rows = torch.randn(seeds, features, width, device=device, generator=generator)
        self.register_buffer("embedding", rows / rows.norm(dim=-1, keepdim=True))
        self.layers = nn.ModuleList(
            ResidualLayer(seeds, width, neurons, device=device) for _ in range(layers)
        )
        with torch.no_grad():
            for parameter in self.learnt():
                parameter.normal_(0, math.sqrt(2 / (width + neurons)), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        residual = torch.bmm(x, self.embedding)
        for layer in self.layers:
            residual = residual + layer(residual)
        return torch.bmm(residual, self.embedding.mT)

    def learnt(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def loss(self, x: Tensor) -> Tensor:
        return (self.folded(x) - self.wanted(x)).square().mean((1, 2))

    def folded(self, x: Tensor) -> Tensor:
        """Return what `forward` does, with the linear maps between two relus multiplied first."""
        embedding = self.embedding
        writes, hidden = [embedding], [x]
        for layer in self.layers:
            assert isinstance(layer, ResidualLayer)
            read = layer.mlp_in.weight.mT
            parts = [
                torch.bmm(here, torch.bmm(write, read))
                for here, write in zip(hidden, writes, strict=True)
            ]
            hidden.append(sum(parts[1:], parts[0]).relu())
            writes.append(layer.mlp_out.weight.mT)
        parts = [
            torch.bmm(here, torch.bmm(write, embedding.mT))
            for here, write in zip(hidden, writes, strict=True)
        ]
        return sum(parts[1:], parts[0])

    def settle(self) -> None:
        """Nothing follows from what was trained."""

    def wanted(self, x: Tensor) -> Tensor:
        return x + x.relu()


def resid_mlp_plan(layers: int) -> ToyPlan:
    """Return the plan of a network of 1 to 3 layers, as published."""
    features, neurons, components, steps = SHAPES[layers]
    data = SparseFeatures(features=features, probability=0.01, low=-1.0, high=1.0)
    name = f"resid_mlp{layers}"
    probe = data.probe(device="cpu")
    read = {f"layers.{n}.mlp_in": Truth(kind="identity", size=features) for n in range(layers)}
    written = {f"layers.{n}.mlp_out": Truth(kind="dense", size=neurons) for n in range(layers)}

    def build(seeds: int, generator: Generator) -> nn.Module:
        return ResidMLP(features, WIDTH, neurons, layers, seeds=seeds, generator=generator)

    def check(network: nn.Module, draw: Callable[[int], Tensor]) -> None:
        assert isinstance(network, ResidMLP)
        embedding = network.embedding
        requested = probe.to(embedding.device).expand(len(embedding), -1, -1)
        check_features(
            name, inputs=network(requested), wanted=network.wanted(requested), tolerance=TOLERANCE
        )

    return ToyPlan(
        name=name,
        build=build,
        data=data,
        pretraining=Pretraining(steps=steps, batch_size=2048, lr=3e-3, schedule="cosine"),
        check=check,
        sites={"layers.*.mlp_in": components, "layers.*.mlp_out": components},
        truth=read | written,
        probe=probe,
    )
