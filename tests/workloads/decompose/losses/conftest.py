"""Decompositions small enough to follow by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.losses.terms import Step


class Seeded(nn.Module):
    """A linear layer for every seed, as targets have it."""

    def __init__(self, seeds: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.seeds = seeds
        self.weight = nn.Parameter(torch.randn(seeds, d_out, d_in))
        self.bias = nn.Parameter(torch.randn(seeds, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias[:, None], x, self.weight.mT)


@pytest.fixture
def numbers() -> Callable[..., Step]:
    """A step of y = 2 (3 x), whose components are 2 and 1: each leaves 1 of its weight."""

    def make(x: tuple[float, ...] = (1.0, 2.0), importance=(0.5, 0.25), **more: Any) -> Step:
        target = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        for layer, weight in zip(target, (3.0, 2.0), strict=True):
            nn.init.constant_(layer.weight, weight)
        decomposition = Decomposition(target, find_sites(target, {"*": 1})).double()
        for parameter, value in zip(
            decomposition.components.parameters(), (1, 2, 1, 1), strict=True
        ):
            nn.init.constant_(parameter, value)
        rows = torch.tensor(x, dtype=torch.float64)[:, None]
        lower = [torch.full((1, len(x), 1), g, dtype=torch.float64) for g in importance]
        settings = {
            "decomposition": decomposition,
            "args": (rows,),
            "target": 6 * rows,
            "lower": [each.requires_grad_() for each in lower],
            "upper": lower,
            "progress": torch.tensor(0.0, dtype=torch.float64),
            "divergence": "mse",
        }
        return Step(**{**settings, **more})

    return make


@pytest.fixture
def network() -> Callable[..., Step]:
    """A step of two layers with a ReLU between, for several seeds side by side."""

    def make(*, seeds: int = 2, rows: int = 6, device: str = "cpu", **more: Any) -> Step:
        torch.manual_seed(0)
        target = nn.Sequential(Seeded(seeds, 3, 4), nn.ReLU(), Seeded(seeds, 4, 5))
        sites = find_sites(target, {"0": 6, "2": 7})
        decomposition = Decomposition(target, sites, seeds=seeds).double().to(device)
        x = torch.randn(seeds, rows, 3, dtype=torch.float64, device=device)
        lower = [torch.rand(seeds, rows, c, dtype=torch.float64, device=device) for c in (6, 7)]
        settings = {
            "decomposition": decomposition,
            "args": (x,),
            "batch_dim": 1,
            "target": decomposition(x).output,
            "lower": [each.requires_grad_() for each in lower],
            "upper": lower,
            "progress": torch.tensor(0.5, dtype=torch.float64, device=device),
            "divergence": "mse",
        }
        return Step(**{**settings, **more})

    return make
