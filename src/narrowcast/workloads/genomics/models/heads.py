"""Heads: class of a sequence, class of each letter, next letter."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import ConfigError

Pool = Literal["mean", "max", "cls", "attention", "position", "all"]
NARROWER = 4
"""Factor by which states are narrowed for pool=position."""


class SequenceHead(nn.Module):
    """Pooling and an MLP.

    `position` has weights per position, for aligned sequences. `all` is max and mean together, and
    position if there is a length.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        pool: Pool = "mean",
        dropout: float = 0.0,
        *,
        length: int = 0,
    ) -> None:
        super().__init__()
        if pool == "position" and length < 1:
            raise ConfigError(
                "pool=position needs a length, because it has one weight per position. Give length."
            )
        self.pool, self.length = pool, length
        narrow = max(width // NARROWER, 1)
        placed = pool == "position" or (pool == "all" and length > 0)
        self.narrow = nn.Linear(width, narrow, bias=False) if placed else None
        self.position = nn.Linear(length * narrow, width) if placed else None
        self.query = nn.Linear(width, 1, bias=False) if pool == "attention" else None
        parts = 2 + placed if pool == "all" else 1
        self.hidden = nn.Linear(parts * width, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, classes)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits, (rows, classes)."""
        pooled = self.dropout(self.pooled(hidden, mask))
        out: Tensor = self.out(self.dropout(F.gelu(self.hidden(pooled))))
        return out

    def pooled(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return one vector per sequence, (rows, width); wider with pool=all."""
        if mask is None:
            mask = hidden.new_ones(hidden.shape[:2], dtype=torch.bool)
        real = mask[..., None]
        match self.pool:
            case "position":
                return self._placed(hidden, real)
            case "cls":
                return hidden[:, 0]
            case "max":
                return _largest(hidden, real)
            case "all":
                parts = [_largest(hidden, real), self._weighted(hidden, real)]
                if self.position is not None:
                    parts.append(self._placed(hidden, real))
                return torch.cat([part.to(hidden.dtype) for part in parts], 1)
            case _:
                return self._weighted(hidden, real)

    def _placed(self, hidden: Tensor, real: Tensor) -> Tensor:
        assert self.narrow is not None
        assert self.position is not None
        stored = (self.narrow(hidden) * real)[:, : self.length]
        missing = self.length - stored.shape[1]
        placed: Tensor = self.position(F.pad(stored, (0, 0, 0, missing)).flatten(1))
        return placed

    def _weighted(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Return the mean, or with pool=attention the mean by learned weights."""
        if self.query is None:
            weights = real.to(_wide(hidden.dtype))
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        else:
            scores = self.query(hidden).to(_wide(hidden.dtype))
            weights = scores.masked_fill(~real, torch.finfo(scores.dtype).min).softmax(1)
        return (hidden * weights).sum(1)


def _largest(hidden: Tensor, real: Tensor) -> Tensor:
    return hidden.masked_fill(~real, torch.finfo(hidden.dtype).min).amax(1)


class TokenHead(nn.Module):
    """MLP that classifies each letter."""

    def __init__(self, width: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, classes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits, (rows, length, classes)."""
        hidden = F.gelu(self.hidden(self.dropout(hidden)))
        out: Tensor = self.out(self.dropout(hidden))
        return out


class NextTokenHead(nn.Module):
    """Linear layer that predicts the next token."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits, (rows, length, vocab)."""
        out: Tensor = self.out(hidden)
        return out


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
