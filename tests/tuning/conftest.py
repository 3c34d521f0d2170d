"""A GPU whose measured speeds are inputs, and a model with layers of the widths it knows."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.hardware import Hardware, Speeds, Support

NATIVE = Support(how="native", reason="compute capability 9.0")


@pytest.fixture(scope="session")
def gpu():
    """A GPU on which fp8 with delayed scales halves the time of every layer."""
    widths, rows = (32, 64, 128), (64, 256)
    shapes = list(itertools.product(rows, widths, widths))
    seconds = {"bf16": tuple(1e-9 * a * b * c for a, b, c in shapes)}
    seconds["delayed"] = tuple(0.5 * value for value in seconds["bf16"])
    return Hardware(
        device="cuda:0",
        name="NVIDIA H200",
        memory_bytes=140 * 2**30,
        capability=(9, 0),
        products=dict.fromkeys(("tf32", "bf16", "fp16", "e4m3", "e5m2"), NATIVE),
        speeds=Speeds(
            gpu="NVIDIA H200", torch="2.13.0", date="2026-11-19",
            tokens=rows, inputs=widths, outputs=widths, seconds=seconds,
        ),
    )  # fmt: skip


class Block(nn.Module):
    """A pre-norm MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network()


@pytest.fixture(scope="session")
def batches():
    """Batches of a task that can be learned: the largest of 16 inputs."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(64, 32, generator=generator) for _ in range(60)]
    return [(x, x[:, :16].argmax(1)) for x in inputs]
