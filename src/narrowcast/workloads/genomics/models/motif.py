"""A small network for motifs: wide filters over letters, pooled, then dilated convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.genomics.models.config import GenomicConfig

TAPS = 3
DILATIONS = (1, 3, 9)
"""Dilations of the blocks in turn."""
START = 0.5
"""Weight of a letter in a filter that starts from a k-mer, several times the usual one."""
REACH = 4
"""Letters left beside those that differ, where all sequences share their ends."""


class MotifBlock(nn.Module):
    """A residual block: convolution, norm, ReLU."""

    def __init__(self, width: int, *, dilation: int, dropout: float) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, TAPS, padding=dilation, dilation=dilation)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return (rows, channels, length); what is not `real` is 0."""
        update = self.norm(self.convolution(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.dropout(F.relu(update)) * real
        return out


class MotifModel(nn.Module):
    """Hidden states of `config.pooling` letters each; `letters` are the last ids of the vocabulary.

    Reads the letters from `config.window_start` to `config.window_end` only, if there is an end.
    """

    def __init__(self, config: GenomicConfig, letters: int) -> None:
        super().__init__()
        self.config = config
        one_hot = torch.zeros(config.vocab_size, letters)
        one_hot[-letters:] = torch.eye(letters)
        self.register_buffer("one_hot", one_hot, persistent=False)
        self.one_hot: Tensor
        kernel = config.kernel
        self.filters = nn.Conv1d(letters, config.width, kernel, padding=kernel // 2)
        self.norm = nn.LayerNorm(config.width)
        self.blocks = nn.ModuleList(
            MotifBlock(
                config.width, dilation=DILATIONS[at % len(DILATIONS)], dropout=config.dropout
            )
            for at in range(config.layers)
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states, (rows, patches, width), which do not depend on padding."""
        tokens, mask = self._window(tokens), self._window(mask)
        pooling = self.config.pooling
        x = self.filters((self.one_hot[tokens] * mask[..., None]).transpose(1, 2))
        if pooling > 1:
            # A filter that begins at padding must not be the largest of its patch.
            x = x.masked_fill(~mask[:, None], torch.finfo(x.dtype).min)
            x = F.max_pool1d(x, pooling, ceil_mode=True)
        real = self._pooled(mask)[:, None].to(x.dtype)
        x = F.relu(self.norm((x * real).transpose(1, 2)).transpose(1, 2)) * real
        for block in self.blocks:
            x = block(x, real)
        out: Tensor = x.transpose(1, 2)
        return out

    def pooled_mask(self, mask: Tensor) -> Tensor:
        """Return which hidden states have letters."""
        return self._pooled(self._window(mask))

    def stages(self) -> list[nn.Module]:
        """Return the stages from input to output, which hold all parameters."""
        return [self.filters, self.norm, *self.blocks]

    @torch.no_grad()
    def start_from(self, kmers: list[list[int]]) -> None:
        """Start one filter per k-mer, given as letter numbers, at its letters."""
        weight = self.filters.weight
        for row, kmer in zip(weight, kmers, strict=False):
            row *= 0.5
            first = (row.shape[1] - len(kmer)) // 2
            for at, letter in enumerate(kmer, start=first):
                row[:, at] -= START / row.shape[0]
                row[letter, at] += START

    def _window(self, letters: Tensor) -> Tensor:
        config = self.config
        if not config.window_end:
            return letters
        return letters[:, config.window_start : config.window_end]

    def _pooled(self, mask: Tensor) -> Tensor:
        if self.config.pooling == 1:
            return mask
        pooled = F.max_pool1d(mask[:, None].float(), self.config.pooling, ceil_mode=True)
        return pooled[:, 0] > 0
