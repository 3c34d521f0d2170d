"""Networks that predict importances, with weights of their own for every seed.

With kernels the hidden layer, (seeds, rows, components, units), is never in memory.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.workloads.decompose.components.masked import FORMATS, has_kernels

HIDDEN_GAIN = math.sqrt(2)
"""Of a layer that a nonlinearity follows; what sees the logits has gain 1."""
ROTARY_BASE = 10_000.0
BEGUN = 0.1
"""Size of the stream where every input is 0: at 0, norms would make gradients overflow fp32."""


class SeededDense(nn.Module):
    """A linear layer for every seed."""

    def __init__(self, seeds: int, d_in: int, d_out: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(seeds, d_in, d_out) * (gain / math.sqrt(d_in)))
        self.bias = nn.Parameter(torch.zeros(seeds, 1, d_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map (seeds, rows, d_in) to (seeds, rows, d_out)."""
        return torch.baddbmm(self.bias, x, self.weight)


class SharedMLP(nn.Module):
    """An MLP per seed from a vector to all outputs."""

    def __init__(self, seeds: int, d_in: int, hidden: Sequence[int], d_out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SeededDense(seeds, wide, narrow, gain=HIDDEN_GAIN)
            for wide, narrow in pairwise((d_in, *hidden))
        )
        self.last = SeededDense(seeds, (d_in, *hidden)[-1], d_out)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        out: Tensor = self.last(x)
        return out


class ComponentMLP(nn.Module):
    """An MLP per component, from a shared vector of `d_in`, or from its own activation if None."""

    def __init__(
        self, seeds: int, d_in: int | None, hidden: Sequence[int], components: int
    ) -> None:
        super().__init__()
        self.shares, fan, first = d_in is not None, d_in or 1, hidden[0]
        shape = (seeds, fan, components * first) if self.shares else (seeds, components, first)
        self.first = nn.Parameter(torch.randn(shape) * (HIDDEN_GAIN / math.sqrt(fan)))
        self.first_bias = nn.Parameter(torch.zeros(seeds, components, first))
        self.middle = nn.ParameterList(
            torch.randn(seeds, components, wide, narrow) * (HIDDEN_GAIN / math.sqrt(wide))
            for wide, narrow in pairwise(hidden)
        )
        self.middle_biases = nn.ParameterList(
            torch.zeros(seeds, components, narrow) for narrow in hidden[1:]
        )
        self.last = nn.Parameter(torch.randn(seeds, components, hidden[-1]) / math.sqrt(hidden[-1]))
        self.last_bias = nn.Parameter(torch.zeros(seeds, components))

    def forward(self, x: Tensor) -> Tensor:
        """Map (seeds, rows, d_in or components) to (seeds, rows, components)."""
        if not self.shares and not len(self.middle):
            return scalar_mlp(x, self.first, self.first_bias, self.last, self.last_bias)
        if self.shares:
            bias = self.first_bias.flatten(1)[:, None]
            x = F.gelu(torch.baddbmm(bias, x, self.first)).unflatten(-1, self.first_bias.shape[1:])
        else:
            x = F.gelu(x[..., None] * self.first[:, None] + self.first_bias[:, None])
        for weight, bias in zip(self.middle, self.middle_biases, strict=True):
            x = F.gelu(torch.einsum("snci,scij->sncj", x, weight) + bias[:, None])
        return (x * self.last[:, None]).sum(-1) + self.last_bias[:, None]


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
        """Return (seeds, rows, d_out); every `length` rows are the positions of one sample."""
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
        x = x + self.out(self._gathered(self.qkv(_normed(x)), turns))
        out: Tensor = x + self.down(F.gelu(self.up(_normed(x))))
        return out

    def _gathered(self, qkv: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attention outputs (seeds, rows, width)."""
        seeds, rows, _ = qkv.shape
        separate = qkv.reshape(-1, turns[0].shape[0], 3, self.heads, self.head_width)
        query, key, value = separate.permute(2, 0, 3, 1, 4).unbind(0)  # (texts, heads, length, ...)
        result = F.scaled_dot_product_attention(_turned(query, turns), _turned(key, turns), value)
        return result.transpose(1, 2).reshape(seeds, rows, -1)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, x.shape[-1:])


def _turns(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions, (length, head width / 2)."""
    half = torch.arange(head_width // 2, device=device, dtype=torch.float32)
    speeds = torch.exp(half * (-2 * math.log(ROTARY_BASE) / head_width))
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * speeds
    return angles.cos(), angles.sin()


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (each.to(x.dtype) for each in turns)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)


def scalar_mlp(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Return b2 + Σ_j w2_j gelu(w1_j h + b1_j) with the exact GELU; w1 is (seeds, C, units)."""
    known = all(each.dtype in FORMATS for each in (h, w1, b1, w2, b2))
    if known and h.shape[1] > 0 and has_kernels(h.device.type):
        result: Tensor = _apply(h, w1, b1, w2, b2)
        return result
    with torch.autocast(h.device.type, enabled=False):
        return _plain(h, w1, b1, w2, b2)


def _plain(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Compute with rows along the last dimension: half the time of sums along the units."""
    seeds, rows, count = h.shape
    w1, b1, w2 = (each.flatten(0, 1) for each in (w1, b1, w2))  # (seeds · components, units)
    lines = h.mT.reshape(seeds * count, 1, rows).to(torch.promote_types(h.dtype, w1.dtype))
    hidden = F.gelu(torch.baddbmm(b1.unsqueeze(2), w1.unsqueeze(2), lines))
    out = torch.baddbmm(b2.reshape(-1, 1, 1), w2.unsqueeze(1), hidden)
    return out.reshape(seeds, count, rows).mT.to(h.dtype)


class _ScalarMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h, weights = h.contiguous(), torch.stack([w1.mT, b1.mT, w2.mT]).float()
        ctx.save_for_backward(h, weights)
        ctx.formats = w1.dtype, b1.dtype, w2.dtype, b2.dtype
        result: Tensor = torch.ops.narrowcast.scalar_mlp(h, weights, b2.float().contiguous())
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        to_h, sums = torch.ops.narrowcast.scalar_mlp_back(grad.contiguous(), h, weights, needs[0])
        _, seeds, units, count = weights.shape
        *hidden, last = sums.split([seeds * count * units] * 3 + [seeds * count])
        own = [each.view(seeds, count, units) for each in hidden]
        both = zip((*own, last.view(seeds, count)), ctx.formats, strict=True)
        return to_h if needs[0] else None, *[each.to(dtype) for each, dtype in both]


_apply: Any = _ScalarMlp.apply


def _mlp_forward(h: Tensor, weights: Tensor, last: Tensor) -> Tensor:
    from narrowcast.workloads.decompose.components.kernels import importance  # needs Triton

    return importance.mlp_forward(h, weights, last)


def _mlp_backward(grad: Tensor, h: Tensor, weights: Tensor, to_h: bool) -> tuple[Tensor, Tensor]:
    from narrowcast.workloads.decompose.components.kernels import importance

    return importance.mlp_backward(grad, h, weights, to_h=to_h)


def _shape(h: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(h)


def _shapes(_: Tensor, h: Tensor, weights: Tensor, to_h: bool) -> tuple[Tensor, Tensor]:
    sums = weights.new_empty(weights.numel() + h.shape[0] * h.shape[2])
    return torch.empty_like(h) if to_h else h.new_empty(0), sums


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "scalar_mlp(Tensor h, Tensor weights, Tensor last) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
_library.define(
    "scalar_mlp_back(Tensor grad, Tensor h, Tensor weights, bool to_h) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("scalar_mlp", _mlp_forward, "CompositeExplicitAutograd")
_library.impl("scalar_mlp_back", _mlp_backward, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::scalar_mlp", _shape)
torch.library.register_fake("narrowcast::scalar_mlp_back", _shapes)
