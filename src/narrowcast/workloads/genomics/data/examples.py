"""Tokenized sequences with their targets, in batches of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.workloads.genomics.data.rows import UNLABELLED, Numbers

Batch: TypeAlias = dict[str, Tensor]
"""`tokens`, `mask` (true for real tokens), `targets`, and `alternative` for pairs."""

Targets: TypeAlias = "npt.NDArray[Any] | Ragged | None"
"""One per row, one per token (ragged), or None if the next token is the target."""

LETTER_PADDING = 0
SHAPE_STEP = 8
"""Widths are multiples of it, as 16-bit and 8-bit matrix products need."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """Rows of different lengths, concatenated in one array."""

    values: npt.NDArray[Any]
    ends: Numbers

    @classmethod
    def joined(cls, rows: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Ragged:
        """Concatenate rows."""
        values = np.concatenate([np.empty(0, dtype=dtype), *rows]).astype(dtype, copy=False)
        return cls(values=values, ends=np.cumsum([len(row) for row in rows], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        start = self.ends[index - 1] if index else 0
        return self.values[start : self.ends[index]]

    @property
    def longest(self) -> int:
        return int(np.diff(self.ends, prepend=0).max(initial=0))

    @property
    def width(self) -> int:
        """Width of a batch that holds any row."""
        return -(-self.longest // SHAPE_STEP) * SHAPE_STEP

    def padded(self, indices: Sequence[int], width: int, filler: int) -> Tensor:
        """Return rows padded to one width: (rows, width), int64."""
        out = np.full((len(indices), width), filler, dtype=np.int64)
        for at, index in enumerate(indices):
            row = self[index]
            out[at, : len(row)] = row
        return torch.from_numpy(out)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Examples to train or evaluate on, by index."""

    tokens: Ragged
    targets: Targets
    alternatives: Ragged | None = None
    names: tuple[str, ...] = ()
    width: int = 0
    """Width of every batch; 0: the width of the longest row."""
    padding: int = 0
    letters: Ragged | None = None
    """Single letters, if `tokens` are of a published tokenizer; for linear models."""
    opposite: Ragged | None = None
    """Tokens of the other strand, if they are of a published tokenizer and both count the same."""
    repeats: int = 1
    """How often each row occurs, for training sets that are smaller than a batch."""

    def __len__(self) -> int:
        return len(self.tokens) * self.repeats

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a batch padded to one width."""
        width = self.width or self.common_width
        indices = [index % len(self.tokens) for index in indices]
        batch = {"tokens": self.tokens.padded(indices, width, self.padding)}
        batch["mask"] = batch["tokens"] != self.padding
        if self.alternatives is not None:
            batch["alternative"] = self.alternatives.padded(indices, width, self.padding)
            # Of a pair of unequal lengths, the letters that one lacks are a gap in it.
            batch["mask"] |= batch["alternative"] != self.padding
        if self.letters is not None:
            batch["letters"] = self.letters.padded(indices, self.letters.width, LETTER_PADDING)
        if self.opposite is not None:
            batch["opposite"] = self.opposite.padded(indices, width, self.padding)
            batch["opposite_mask"] = batch["opposite"] != self.padding
        if isinstance(self.targets, Ragged):
            batch["targets"] = self.targets.padded(indices, width, UNLABELLED)
        elif self.targets is not None:
            batch["targets"] = torch.from_numpy(self.targets[indices])
        return batch

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, `size` at a time."""
        for first in range(0, len(self), size):
            yield self.__getitems__(list(range(first, min(first + size, len(self)))))

    def rows(self, indices: npt.NDArray[np.int64]) -> Examples:
        """Return some of the rows, of single sequences with one target each."""
        assert isinstance(self.targets, np.ndarray)
        assert self.alternatives is None
        tokens = Ragged.joined([self.tokens[int(at)] for at in indices], self.tokens.values.dtype)
        return replace(self, tokens=tokens, targets=self.targets[indices], names=())

    @property
    def common_width(self) -> int:
        """Width of a batch that holds any row."""
        others = (each for each in (self.alternatives, self.opposite) if each is not None)
        return max(self.tokens.width, *(each.width for each in others), 0)

    def digest(self) -> str:
        """Return a fingerprint of the examples."""
        ragged = [part for part in (self.tokens, self.alternatives) if part is not None]
        targets = self.targets
        if isinstance(targets, Ragged):
            ragged.append(targets)
        arrays = [each for part in ragged for each in (part.values, part.ends)]
        if isinstance(targets, np.ndarray):
            arrays.append(targets)
        return fingerprint(*arrays)


def on(device: torch.device, batch: Batch) -> Batch:
    """Return the batch copied to a device."""
    return {key: value.to(device) for key, value in batch.items()}
