"""What a workload supplies so that the engine can train it."""

from typing import Protocol, TypeAlias

from torch import Tensor, nn

Batch: TypeAlias = tuple[Tensor, ...]
"""Tensors that share their first dimension, the samples."""


class MapDataset(Protocol):
    """Samples by number; the same numbers give the same batch, in any process, at any time."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def __getitems__(self, indices: list[int], /) -> Batch:
        """Return the samples of `indices`, in that order, stacked, on the CPU."""
        ...


class Task(Protocol):
    """A model, what it is trained on, and how both are judged."""

    @property
    def model(self) -> nn.Module:
        """The model, on its device and in the mode (`train` or `eval`) its modules train in."""
        ...

    @property
    def train_data(self) -> MapDataset:
        """The samples to train on."""
        ...

    @property
    def gemm_rows(self) -> int:
        """Rows that the linear layers of the model multiply at once: tokens per micro-batch."""
        ...

    def loss(self, model: nn.Module, batch: Batch, /) -> Tensor:
        """Return the mean loss of `model` on `batch`, a tensor without dimensions."""
        ...

    def items(self, batch: Batch, /) -> int:
        """Return how many of what the task counts (tokens, samples) `batch` trains on."""
        ...

    def evaluate(self, model: nn.Module, /) -> dict[str, float]:
        """Return measures on held-out data; the first is the headline, and lower is better."""
        ...
