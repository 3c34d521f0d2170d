"""Decompositions small enough to follow by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


class Reader(nn.Module):
    """A language model of one layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key, value = self.qkv(x).chunk(3, -1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + self.out(seen))


@pytest.fixture
def language() -> Callable[..., Step]:
    """A step of texts of five tokens, in fp32, with KL between distributions of the next one."""

    def make(*, texts: int = 4, device: str = "cpu", **more: Any) -> Step:
        torch.manual_seed(0)
        target = Reader()
        sites = find_sites(target, {"qkv": 6, "out": 5, "head": 9})
        decomposition = Decomposition(target, sites).to(device)
        tokens = torch.randint(11, (texts, 5)).to(device)
        lower = [torch.rand(1, texts * 5, site.components).to(device) for site in sites]
        settings = {
            "decomposition": decomposition,
            "args": (tokens,),
            "target": decomposition(tokens).output,
            "lower": [each.requires_grad_() for each in lower],
            "upper": lower,
            "progress": torch.tensor(0.5, device=device),
            "divergence": "kl",
        }
        return Step(**{**settings, **more})

    return make


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
