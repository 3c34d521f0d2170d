"""Several conversations in one row, each seeing only itself.

A row of a batch says where its conversations begin by positions that start again at 0; from these
alone follow a mask for any attention, the arguments of attention over lengths, and what
transformers itself makes of `position_ids`. What fills a row up is one more conversation, of which
nothing is learnt.
"""

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
"""The label that torch's cross-entropy leaves out."""
MULTIPLE = 8
"""Widths of batches; products of 16-bit numbers are fast in full eights."""

Pack = tuple[int, ...]
"""Rows that share one."""


def packed(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Put rows together, none of them cut: the longest first, each where least room is left.

    Takes at most 11/9 of the fewest rows possible, and one more (best-fit decreasing).
    """
    packs: list[list[int]] = []
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # those of some pack, ascending
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
    """Return every row by itself."""
    return [(number,) for number in range(rows)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """Batches by number, of rows that were put together or left alone."""

    rows: TokenRows
    packs: Sequence[Pack]
    padding: int
    """Some token of the vocabulary."""
    width: int | None
    """Tokens of every row of a batch; none: those of its longest, in full eights."""

    def __len__(self) -> int:
        return len(self.packs)

    def __getitems__(self, numbers: list[int]) -> dict[str, Tensor]:
        """Return a batch: `input_ids`, `labels` and `position_ids`, each (rows, width).

        A label is the token at its own place, as transformers has it: the model's output at one
        place is for the label at the next. The first of a conversation is never learnt, so that no
        conversation is asked to go on as another.
        """
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
        """The share of a batch that is tokens of conversations, where every row has one width."""
        longest = self.width or int(self.rows.lengths.max(initial=1))
        return int(self.rows.offsets[-1]) / (max(len(self), 1) * longest)


class Lengths(NamedTuple):
    """What attention over lengths takes, of a batch laid end to end."""

    cu_seqlens: Tensor
    """Where each conversation begins, and where the last one ends; int32."""
    max_seqlen: int
    """Tokens of the longest."""


def document_ids(position_ids: Tensor) -> Tensor:
    """Return which conversation of its row each token belongs to, counted from 0."""
    return (position_ids == 0).cumsum(-1) - 1  # (rows, width)


def attention_mask(position_ids: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
    """Return who sees whom, (rows, 1, width, width): those before in the same conversation.

    True where it sees; of a float dtype, what is added to scores: 0, or the lowest number.
    """
    documents = document_ids(position_ids)
    width = position_ids.shape[-1]
    causal = torch.ones(width, width, dtype=torch.bool, device=position_ids.device).tril()
    sees = (documents[:, None, :, None] == documents[:, None, None, :]) & causal
    if dtype == torch.bool:
        return sees
    return torch.zeros_like(sees, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)


def sequence_lengths(position_ids: Tensor) -> Lengths:
    """Return where conversations begin in a batch laid end to end; waits for the device."""
    flat = position_ids.reshape(-1)
    starts = (flat == 0).nonzero().reshape(-1).to(torch.int32)
    end = torch.tensor([flat.numel()], dtype=torch.int32, device=flat.device)
    bounds = torch.cat([starts, end])
    return Lengths(bounds, int(bounds.diff().max()))
