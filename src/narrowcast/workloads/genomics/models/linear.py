"""Linear models of tokens: k-mer counts, or letters by position."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
@dataclass(frozen=True, kw_only=True)
class Features:
    """What a linear model counts."""

    letters: int
    """Letters of the alphabet, the last ids of the vocabulary."""
    first: int
    """Id of the first letter."""
    k: int = 0
    """Longest k-mer that is counted, beside all shorter ones; 0: letters by position."""
    length: int = 0
    """Positions, if letters are by position."""
    complement: tuple[int, ...] = ()
    """Complement of each letter, if a k-mer and its reverse complement are one."""

    @property
    def name(self) -> str:
        """Name in reports."""
        if not self.k:
            return "letters by position"
        return f"k-mers up to {self.k}{', both strands' if self.complement else ''}"

    @property
    def size(self) -> int:
        """Number of features."""
        if not self.k:
            return self.length * self.letters
        return sum(self.letters**k for k in range(1, self.k + 1))

    def indices(self, tokens: Tensor) -> Tensor:
        """Return the features that each row has, repeated if counted twice; `size` is none."""
        letters = tokens - self.first
        letters = letters.where((letters >= 0) & (letters < self.letters), -1)
        if not self.k:
            letters = letters[:, : self.length]
            places = torch.arange(letters.shape[1], device=letters.device) * self.letters
            return torch.where(letters < 0, self.size, letters + places)
        kmers, start = [], 0
        for k in range(1, self.k + 1):
            kmers.append(self._kmers(letters, k, start))
            start += self.letters**k
        return torch.cat(kmers, 1)

    def _kmers(self, letters: Tensor, k: int, start: int) -> Tensor:
        """Return the numbers of all k-mers of length `k`, which begin at `start`."""
        count = max(letters.shape[1] - k + 1, 0)
        code = letters.new_zeros(letters.shape[0], count)
        known, turned = torch.ones_like(code, dtype=torch.bool), torch.zeros_like(code)
        table = letters.new_tensor(self.complement) if self.complement else None
        for at in range(k):
            letter = letters[:, at : at + count]
            known &= letter >= 0
            code = code * self.letters + letter
            if table is not None:
                turned += table[letter.clamp(min=0)] * self.letters**at
        if table is not None:
            code = torch.minimum(code, turned)
        return torch.where(known, code + start, self.size)


@final
class Linear(nn.Module):
    """Outputs of a linear model: logits, or a standardised value."""

    runs_in_fp32 = True

    def __init__(self, features: Features, outputs: int) -> None:
        super().__init__()
        self.features = features
        # The last row is that of features that are none.
        self.register_buffer("weight", torch.zeros(features.size + 1, outputs))
        self.register_buffer("bias", torch.zeros(outputs))
        self.weight: Tensor
        self.bias: Tensor

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Return (rows, outputs) in fp32."""
        with torch.autocast(tokens.device.type, enabled=False):
            rows = self.features.indices(tokens)
            out: Tensor = F.embedding_bag(rows, self.weight, mode="sum") + self.bias
        return out
