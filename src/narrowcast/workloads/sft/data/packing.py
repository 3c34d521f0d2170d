"""Packed rows: several conversations per row, without attention between them."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from narrowcast.workloads.sft.data.tokenised import TokenRows

IGNORED = -100
"""Label that cross-entropy ignores."""
MULTIPLE = 8
"""Widths are multiples of 8 for fast 16-bit matmuls."""

Pack = tuple[int, ...]
"""Numbers of the rows in one pack."""


def packed(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Pack rows by best-fit decreasing: at most 11/9 of the optimal number of rows, plus one."""
    packs: list[list[int]] = []
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # of existing packs, ascending
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[number]
        if length > capacity:
            raise ValueError(
                f"row {number} has {length} tokens, more than the pack capacity of {capacity}"
            )
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            pack = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(number)
        left = room - length
        if not by_room[left]:
            insort(rooms, left)
        by_room[left].append(pack)
    return [tuple(pack) for pack in packs]


def alone(rows: int) -> list[Pack]:
    """Return one pack per row."""
    return [(number,) for number in range(rows)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """Batches by number, of packed or single rows."""

    rows: TokenRows
    packs: Sequence[Pack]
    padding: int
    width: int | None
    """Tokens per row; None: as the longest row of the batch, rounded up to a multiple of 8."""

    def __len__(self) -> int:
        return len(self.packs)

    def __getitems__(self, numbers: list[int]) -> dict[str, Tensor]:
        """Return `input_ids`, `labels` (unshifted) and `position_ids`, each (rows, width)."""
        chosen = [[self.rows.row(row) for row in self.packs[number]] for number in numbers]
        widest = max(sum(len(tokens) for tokens, _ in pack) for pack in chosen)
        width = self.width or -(-widest // MULTIPLE) * MULTIPLE
        shape = (len(chosen), width)
        tokens = np.full(shape, self.padding, np.int64)
        labels, positions = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int64)
        for row, pack in enumerate(chosen):
            start = 0
            for ids, learnt in pack:
                span = slice(start, start + len(ids))
                tokens[row, span], positions[row, span] = ids, np.arange(len(ids))
                labels[row, span] = np.where(learnt, ids, IGNORED)
                start += len(ids)
            positions[row, start:] = np.arange(width - start)
        arrays = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @property
    def efficiency(self) -> float:
        """Share of non-padding tokens if all rows have the same width."""
        longest = self.width or int(self.rows.lengths.max(initial=1))
        return int(self.rows.offsets[-1]) / (max(len(self), 1) * longest)


class Lengths(NamedTuple):
    """Arguments of variable-length attention for a flattened batch."""

    cu_seqlens: Tensor
    """Start of each conversation and end of the last, int32."""
    max_seqlen: int


def document_ids(position_ids: Tensor) -> Tensor:
    """Return the index of each token's conversation in its row."""
    return (position_ids == 0).cumsum(-1) - 1  # (rows, width)


def attention_mask(position_ids: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
    """Return the mask, (rows, 1, width, width): bool, or additive for a float dtype."""
    documents = document_ids(position_ids)
    width = position_ids.shape[-1]
    causal = torch.ones(width, width, dtype=torch.bool, device=position_ids.device).tril()
    sees = (documents[:, None, :, None] == documents[:, None, None, :]) & causal
    if dtype == torch.bool:
        return sees
    return torch.zeros_like(sees, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)


def sequence_lengths(position_ids: Tensor) -> Lengths:
    """Return the bounds of the conversations in a flattened batch; synchronises."""
    flat = position_ids.reshape(-1)
    starts = (flat == 0).nonzero().reshape(-1).to(torch.int32)
    end = torch.tensor([flat.numel()], dtype=torch.int32, device=flat.device)
    bounds = torch.cat([starts, end])
    return Lengths(bounds, int(bounds.diff().max()))
