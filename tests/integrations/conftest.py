"""A small network that overflows fp16, and digits to train it on."""

from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    """Pictures of digits, and which they are."""
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


@pytest.fixture(scope="session")
def network() -> Callable[[], nn.Sequential]:
    """Make a network whose first layer leaves the range of fp16."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        with torch.no_grad():
            made[0].weight.mul_(1e6)
        return made

    return make
