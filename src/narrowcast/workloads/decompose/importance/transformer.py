"""A transformer that sees the inputs of all sites at all positions, in both directions."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.decompose.importance.dense import HIDDEN_GAIN, SeededDense

ROTARY_BASE = 10_000.0
BEGUN = 0.1
"""Size of the stream where every input is 0, as of most samples of a toy. A stream of 0 would have
every norm multiply gradients by a thousand, and four blocks overflow fp32."""


class Transformer(nn.Module):
    """Embed what sites are given, let positions see one another, tell the logits of all sites."""

    def __init__(
        self,
        seeds: int,
        d_in: int,
        d_out: int,
        *,
        width: int,
        blocks: int,
        heads: int,
        hidden: int,
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embed = SeededDense(seeds, d_in, width)
        nn.init.normal_(self.embed.bias, std=BEGUN)
        self.blocks = nn.ModuleList(
            Block(seeds, width, heads=heads, hidden=hidden) for _ in range(blocks)
        )
        self.last = SeededDense(seeds, width, d_out)

    def forward(self, inputs: Sequence[Tensor], *, length: int) -> Tensor:
        """Return (seeds, rows, d_out); every `length` rows are the positions of one text."""
        # Each site's input by itself: their sizes say more of the network than of what it reads.
        x = self.embed(torch.cat([_normed(each) for each in inputs], -1))
        turns = _turns(length, self.head_width, x.device)
        for block in self.blocks:
            x = block(x, turns)
        out: Tensor = self.last(x)
        return out


class Block(nn.Module):
    """Attention with rotary positions in both directions, then an MLP; each after a norm."""

    def __init__(self, seeds: int, width: int, *, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.qkv = SeededDense(seeds, width, 3 * width)
        self.out = SeededDense(seeds, width, width)
        self.up = SeededDense(seeds, width, hidden, gain=HIDDEN_GAIN)
        self.down = SeededDense(seeds, hidden, width)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Return the stream `x`, (seeds, rows, width), with this block's contributions."""
        x = x + self.out(self._gathered(self.qkv(_normed(x)), turns))
        out: Tensor = x + self.down(F.gelu(self.up(_normed(x))))
        return out

    def _gathered(self, qkv: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Return what each position gathers from all of its text: (seeds, rows, width)."""
        seeds, rows, _ = qkv.shape
        separate = qkv.reshape(-1, turns[0].shape[0], 3, self.heads, self.head_width)
        query, key, value = separate.permute(2, 0, 3, 1, 4).unbind(0)  # (texts, heads, length, ...)
        result = F.scaled_dot_product_attention(_turned(query, turns), _turned(key, turns), value)
        return result.transpose(1, 2).reshape(seeds, rows, -1)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, x.shape[-1:])


def _turns(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of rotary positions, (length, head width / 2)."""
    half = torch.arange(head_width // 2, device=device, dtype=torch.float32)
    speeds = torch.exp(half * (-2 * math.log(ROTARY_BASE) / head_width))
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * speeds
    return angles.cos(), angles.sin()


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (each.to(x.dtype) for each in turns)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)
