"""A layer whose values outgrow narrow formats, to rehearse what a run does about it.

Test equipment: `rehearse.swell` puts it into a GPT that knows nothing of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.lm.model import GPT, MLP, Block


class SwellingMLP(nn.Module):
    """An mlp of which what goes into the last layer is doubled every so many training passes.

    What comes out is halved as often: powers of two, so that only the range of a format can tell.
    """

    def __init__(self, plain: MLP, *, every: int) -> None:
        super().__init__()
        self.up, self.down, self.every = plain.up, plain.down, every
        self.register_buffer("passes", torch.zeros((), device=plain.up.weight.device))
        self.passes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself: (batch, length, width)."""
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        factor = torch.exp2(torch.floor(self.passes / self.every))
        # In fp32, so that what overflows is the format of the layer, and another one helps.
        out: Tensor = self.down(F.gelu(self.up(x)).float() * factor) / factor
        return out


def let_swell(model: GPT, *, every: int) -> None:
    """Put the layer in place of the middle block's mlp, with its weights and their names."""
    middle = model.blocks[len(model.blocks) // 2]
    assert isinstance(middle, Block)
    assert isinstance(middle.mlp, MLP)
    middle.mlp = SwellingMLP(middle.mlp, every=every)
