"""A backbone with a head: what a task predicts of sequences, of pairs of them, or of letters."""

import torch
from torch import Tensor, nn

from narrowcast.workloads.genomics.models.heads import SequenceHead
from narrowcast.workloads.genomics.models.model import GenomicModel


class Network(nn.Module):
    """Predict from tokens; `alternative` is the same sequence with a variant in it.

    Of a pair, what the variant changed is judged beside what came of it: the head is as wide as
    two backbones.
    """

    def __init__(self, backbone: GenomicModel, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, alternative: Tensor | None = None
    ) -> Tensor:
        """Return what the head makes of (rows, length) tokens."""
        if alternative is None:
            hidden = self.backbone(tokens, mask)
        else:
            known = None if mask is None else torch.cat([mask, mask])
            before, after = self.backbone(torch.cat([tokens, alternative]), known).chunk(2)
            hidden = torch.cat([after - before, after], -1)
        head = self.head
        out: Tensor = head(hidden, mask) if isinstance(head, SequenceHead) else head(hidden)
        return out

    def stages(self) -> list[nn.Module]:
        """Return its parts from input to output, which together hold every parameter."""
        return [*self.backbone.stages(), self.head]
