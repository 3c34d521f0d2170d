"""How the movement of weights between two snapshots is stored: in fewer bits, or in low rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

Keep = Literal["fp32", "bf16", "svd", "random"]
"""fp32 and bf16 keep every element; svd the largest singular vectors of each matrix, and random
its products with a fixed orthonormal basis, both in bf16. What is no matrix is kept in bf16."""

OVERSAMPLED = 4
"""Columns beyond the rank that a range is looked for with: Halko, Martinsson & Tropp (2011)."""
POWER_ITERATIONS = 2
"""Products with the matrix and its transpose that sharpen the range, from the same source."""


@dataclass(frozen=True)
class LowRank:
    """A matrix as a product of a tall and a wide one."""

    left: Tensor  # (rows, rank)
    right: Tensor  # (rank, columns)

    def whole(self) -> Tensor:
        """Return the product in fp32."""
        return self.left.float() @ self.right.float()


def low_rank(matrix: Tensor, *, rank: int, probe: Tensor) -> LowRank:
    """Return the truncated singular value decomposition, found by a randomised range.

    `probe` holds `rank` or more random columns. Exact for a matrix of no higher rank. A matrix of
    zeros gives zeros. Waits for the device: torch looks whether the decomposition has converged.
    """
    found = matrix @ probe
    for _ in range(POWER_ITERATIONS):
        found = matrix @ (matrix.mT @ torch.linalg.qr(found).Q)
    basis = torch.linalg.qr(found).Q
    left, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    rank = min(rank, values.numel())
    return LowRank(basis @ (left[:, :rank] * values[:rank]), right[:rank])


def probe_columns(columns: int, rank: int, *, generator: torch.Generator) -> Tensor:
    """Return random columns to look for the range of a matrix of so many columns with."""
    return torch.randn(columns, min(columns, rank + OVERSAMPLED), generator=generator)


@final
class MoveCode:
    """Stores lists of fp32 tensors of given shapes, and reads them back.

    Random columns are drawn on the host once, by `seed`, so that a resumed run has the same.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        keep: Keep,
        *,
        rank: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._shapes, self._keep, self._rank = list(shapes), keep, rank
        self._device = device
        self._columns: dict[int, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        for columns in dict.fromkeys(s.numel() // s[0] for s in shapes if self._is_cut(s)):
            drawn = probe_columns(columns, rank, generator=generator)
            if keep == "random":
                drawn = torch.linalg.qr(drawn[:, :rank]).Q
            self._columns[columns] = drawn.to(device)

    def bytes_each(self) -> int:
        """Return what one stored list takes."""
        return sum(self._bytes_of(shape) for shape in self._shapes)

    def fixed_bytes(self) -> int:
        """Return what is held once, whatever is stored: random columns."""
        return sum(t.nbytes for t in self._columns.values())

    def encode(self, moves: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return what is stored of a list, on the device."""
        return [self._encode_one(move) for move in moves]

    def decode(self, stored: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """Return a stored list in fp32, on the device, wherever it was put since."""
        return [self.decode_one(i, parts) for i, parts in enumerate(stored)]

    def decode_one(self, i: int, parts: tuple[Tensor, ...]) -> Tensor:
        """Return tensor `i` of a stored list in fp32, on the device."""
        here = [part.to(self._device, non_blocking=True) for part in parts]
        shape = self._shapes[i]
        if not self._is_cut(shape):
            return here[0].to(torch.float32, copy=True)
        right = here[1] if self._keep == "svd" else self._columns[shape.numel() // shape[0]].mT
        return LowRank(here[0], right).whole().view(shape)

    def _encode_one(self, move: Tensor) -> tuple[Tensor, ...]:
        if self._keep == "fp32":
            return (move.to(torch.float32, copy=True),)
        if not self._is_cut(move.shape):
            return (move.to(torch.bfloat16),)
        matrix = move.reshape(move.shape[0], -1)
        columns = self._columns[matrix.shape[1]]
        if self._keep == "random":
            return ((matrix @ columns).bfloat16(),)
        found = low_rank(matrix, rank=self._rank, probe=columns)
        return found.left.bfloat16(), found.right.bfloat16()

    def _bytes_of(self, shape: torch.Size) -> int:
        if self._keep == "fp32":
            return 4 * shape.numel()
        return 2 * (self._cut_numbers(shape) if self._is_cut(shape) else shape.numel())

    def _is_cut(self, shape: torch.Size) -> bool:
        """Say whether a tensor is a matrix that fewer numbers are kept of."""
        if self._keep in ("fp32", "bf16") or len(shape) < 2 or not math.prod(shape):
            return False
        fits = self._rank < min(shape[0], shape.numel() // shape[0])
        return fits and self._cut_numbers(shape) < shape.numel()

    def _cut_numbers(self, shape: torch.Size) -> int:
        columns = shape.numel() // shape[0]
        return self._rank * (shape[0] + (columns if self._keep == "svd" else 0))
