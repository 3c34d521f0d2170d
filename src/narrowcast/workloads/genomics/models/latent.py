"""From letters to patches and back, around the blocks of a model, at a cost linear in letters."""

import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.patches import Patches

LOCAL_TAPS = 9


class PatchFront(nn.Module):
    """Mix near letters, then make one token of each patch."""

    def __init__(self, config: GenomicConfig) -> None:
        super().__init__()
        self.local = nn.ModuleList(LocalBlock(config) for _ in range(config.local_layers))
        self.norm = nn.LayerNorm(config.width)
        self.patch = nn.Linear(config.width, config.width)

    def forward(
        self, letters: Tensor, patches: Patches, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return states of letters, (rows, length, width), and tokens, (rows, patches, width)."""
        for block in self.local:
            letters = block(letters, mask)
        return letters, self.patch(patches.pooled(self.norm(letters)))


class PatchBack(nn.Module):
    """Give letters the states of their patches, or if causal of the patches before, and mix."""

    def __init__(self, config: GenomicConfig) -> None:
        super().__init__()
        self.causal = config.causal
        self.norm = nn.LayerNorm(config.width)
        self.letter = nn.Linear(config.width, config.width)
        self.local = nn.ModuleList(LocalBlock(config) for _ in range(config.local_layers))

    def forward(
        self, letters: Tensor, tokens: Tensor, patches: Patches, mask: Tensor | None
    ) -> Tensor:
        """Return states of letters: (rows, length, width)."""
        # A letter does not know its own patch before that is complete.
        inputs = patches.spread(self.letter(self.norm(tokens)), shifted=self.causal)
        letters = letters + inputs
        for block in self.local:
            letters = block(letters, mask)
        return letters


class LocalBlock(nn.Module):
    """Add to each letter what a few near ones give, channel by channel, then mixed."""

    def __init__(self, config: GenomicConfig) -> None:
        super().__init__()
        width = config.width
        reach = LOCAL_TAPS - 1
        self.padding = (reach, 0) if config.causal else (reach // 2, reach // 2)
        self.norm = nn.LayerNorm(width)
        self.near = nn.Conv1d(width, width, LOCAL_TAPS, groups=width)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the stream `x`, (rows, length, width), with this block's contribution."""
        y = self.norm(x)
        y = y if mask is None else y * mask[..., None]
        near = self.near(F.pad(y.transpose(1, 2), self.padding)).transpose(1, 2)
        out: Tensor = x + self.dropout(self.out(F.gelu(self.mix(near))))
        return out
