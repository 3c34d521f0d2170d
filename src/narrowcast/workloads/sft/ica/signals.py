"""Signals: rows (tokens) by channels, gone through chunk by chunk and as often as needed.

Nobody has to hold them all: a source is a model that is run again, a file, an array, or what
`collect` has stored of one of these in fewer bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from narrowcast.errors import ConfigError

CHUNK_ELEMENTS = 2**22
"""Numbers in a chunk: 16 MiB of fp32, large enough for fast products of a few dozen columns."""


class Signals(Protocol):
    """A source of chunks, (rows, channels) each, that can be gone through again and again."""

    @property
    def channels(self) -> int:
        """How many channels every chunk has."""
        ...

    def __iter__(self) -> Iterator[Tensor]:
        """Begin at the first row, each time; the same rows in the same order."""
        ...


def chunk_rows(channels: int) -> int:
    """Return how many rows make a chunk."""
    return max(64, CHUNK_ELEMENTS // max(channels, 1))


@final
class ArraySignals:
    """Signals that are an array already."""

    def __init__(self, array: Tensor | np.ndarray) -> None:
        try:
            self.array = torch.as_tensor(array)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"signals must be an array, got {type(array)}: {error}.") from None
        if self.array.dim() != 2:
            raise ConfigError(
                "signals must have two dimensions, rows and channels, got shape "
                f"{tuple(self.array.shape)}."
            )

    @property
    def channels(self) -> int:
        """How many columns the array has."""
        return self.array.shape[1]

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.array.split(chunk_rows(self.channels))


@final
@dataclass(frozen=True, kw_only=True)
class FileSignals:
    """Signals in a file of plain numbers, row after row, of which one chunk is in memory."""

    path: Path
    channels: int
    dtype: str = "float32"
    """As numpy calls it."""

    def __iter__(self) -> Iterator[Tensor]:
        stored = np.dtype(self.dtype)
        row = self.channels * stored.itemsize
        if (size := self.path.stat().st_size) % row:
            raise ConfigError(
                f"{self.path} has {size} bytes, which is not a whole number of rows of "
                f"{self.channels} {self.dtype}. Pass the right number of channels."
            )
        # One buffer for all: who keeps a chunk copies it. A GPU copies from memory that stays in
        # its place by itself; else a processor does, half as fast as it reads the file.
        space = torch.empty(
            chunk_rows(self.channels) * row,
            dtype=torch.uint8,
            pin_memory=torch.cuda.is_initialized(),
        ).numpy()
        buffer = space.view(stored).reshape(-1, self.channels)
        with self.path.open("rb", buffering=0) as file:
            while count := file.readinto(space.data):
                yield torch.from_numpy(buffer[: count // row])


@final
@dataclass(frozen=True)
class SignalsOn:
    """Signals of a source, brought to a device chunk by chunk."""

    source: Signals
    device: torch.device

    @property
    def channels(self) -> int:
        """Those of the source."""
        return self.source.channels

    def __iter__(self) -> Iterator[Tensor]:
        for chunk in self.source:
            # The source may write to its chunk as soon as it is asked for the next.
            yield chunk.to(self.device)


@final
@dataclass(frozen=True)
class StoredSignals:
    """Signals in memory, in a dtype of their own."""

    chunks: tuple[Tensor, ...]
    channels: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        return sum(chunk.numel() * chunk.element_size() for chunk in self.chunks)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.chunks

    def columns(self, start: int, stop: int) -> "StoredSignals":
        """Return some of the channels, as a view."""
        return StoredSignals(tuple(c[:, start:stop] for c in self.chunks), stop - start)
