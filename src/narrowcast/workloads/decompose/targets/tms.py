"""Toy models of superposition: n features squeezed through m dimensions and back by one matrix.

x_hat = relu(W^T W x + b)        W (m, n), and with an identity layer between W and W^T
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


@final
class TMS(nn.Module):
    """One network for each seed; `linear2` has the weight of `linear1`, transposed."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        identity: bool = False,
        seeds: int,
        generator: Generator,
    ) -> None:
        super().__init__()
        device = generator.device
        self.linear1 = SeededLinear(seeds, features, hidden, device=device)
        layers = [SeededLinear(seeds, hidden, hidden, device=device)] if identity else []
        self.hidden_layers = nn.ModuleList(layers)
        # The bias begins at zero. From the numbers that nn.Linear begins with, one network of five
        # learns all features; others drop one or two, and some die.
        self.linear2 = SeededLinear(seeds, hidden, features, bias=True, device=device)
        with torch.no_grad():
            # A third of Glorot's. From all of it, 4 networks of 96 and more find no place
            # for a feature, at learning rates of 0.005 to 0.1; so, at 0.02, none of 512 does.
            spread = math.sqrt(2 / (features + hidden)) / 3
            self.linear1.weight.normal_(0, spread, generator=generator)
            for layer in layers:
                layer.weight.copy_(torch.eye(hidden, device=device))
        self.settle()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear1(x)
        for layer in self.hidden_layers:
            x = layer(x)
        return torch.relu(self.linear2(x))

    def learnt(self) -> list[nn.Parameter]:
        assert self.linear2.bias is not None
        return [self.linear1.weight, self.linear2.bias]

    def loss(self, x: Tensor) -> Tensor:
        """Return the mean squared error of each seed, with the one matrix in both places."""
        weight, bias = self.learnt()
        squeezed = torch.bmm(x, weight.mT)  # an identity layer changes nothing
        return (torch.baddbmm(bias[:, None], squeezed, weight).relu_() - x).square().mean((1, 2))

    @torch.no_grad()
    def settle(self) -> None:
        self.linear2.weight.copy_(self.linear1.weight.mT)


def tms_plan(features: int, hidden: int, *, identity: bool = False) -> ToyPlan:
    """Return the plan of a toy model of superposition."""
    data = SparseFeatures(features=features, probability=0.05)
    components = 4 * features
    sites = {"linear1": components, "linear2": components}
    truth = {
        "linear1": Truth(kind="identity", size=features, along="inputs"),
        "linear2": Truth(kind="identity", size=features, along="outputs"),
    }
    if identity:
        sites["hidden_layers.0"] = components
        truth["hidden_layers.0"] = Truth(kind="dense", size=hidden)
    name = f"tms_{features}-{hidden}{'-id' if identity else ''}"
    probe = data.probe(device="cpu")

    def build(seeds: int, generator: Generator) -> nn.Module:
        return TMS(features, hidden, identity=identity, seeds=seeds, generator=generator)

    def check(network: nn.Module, draw: Callable[[int], Tensor]) -> None:
        assert isinstance(network, TMS)
        requested = probe.to(network.linear1.weight.device).expand(network.linear1.seeds, -1, -1)
        check_features(name, inputs=network(requested), wanted=requested)

    return ToyPlan(
        name=name,
        build=build,
        data=data,
        pretraining=Pretraining(steps=3000, batch_size=1024, lr=2e-2, schedule="cosine"),
        check=check,
        sites=sites,
        tied={"linear2": "linear1"},
        truth=truth,
        probe=probe,
    )
