"""Tokens cut into windows: what is fed in, and beside it what should come out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from narrowcast.workloads.lm.tokenizer import Tokens

SYNTHETIC_TOKENS = 2**22
"""Random tokens made for a speed run: 4,096 windows of 1,024, 8 MiB."""


@dataclass(frozen=True)
class Windows:
    """Stretches of `length` tokens and their next tokens; every token is a target at most once."""

    tokens: Tokens
    length: int

    def __len__(self) -> int:
        """Count the whole windows."""
        return max(0, len(self.tokens) - 1) // self.length

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and, one later, targets of several windows: int64 (windows, length)."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.length
        rows = torch.from_numpy(self.tokens[starts + np.arange(self.length + 1)].astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def synthetic_tokens(vocab: int, *, seed: int) -> Tokens:
    """Draw tokens evenly from `vocab`: nothing to learn, and a step costs what real text costs."""
    drawn = np.random.default_rng(seed).integers(vocab, size=SYNTHETIC_TOKENS, dtype=np.int32)
    return drawn.astype(np.uint16) if vocab <= 2**16 else drawn
