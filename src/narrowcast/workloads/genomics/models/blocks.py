"""Residual blocks: one of three mixers, then an MLP."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.hyena import HyenaOperator

ROTARY_BASE = 10_000.0
DILATIONS = (1, 2, 4, 8)
"""Dilations of CNN blocks in turn; with 9 taps, four blocks see 121 letters."""


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, config: GenomicConfig, index: int) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.width)
        self.mixer = _mixer(config, index)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width) if config.gelu == "exact" else TanhMLP(config.width)
        self.dropout = nn.Dropout(config.dropout)
        # What is added to the stream is divided by this, so that depth does not swell it.
        for last in (self.mixer.out, self.mlp.down):
            last.weight.data /= math.sqrt(2 * config.layers)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.mixer(self.mixer_norm(x), mask))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class MLP(nn.Module):
    """MLP with four times the width and the exact GELU."""

    fused_mlp: ClassVar[tuple[str, str, str]] = ("up", "gelu", "down")
    """Names of its parts, for plans that fuse them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class TanhMLP(MLP):
    """MLP with the tanh approximation of the GELU, as published models have it."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Attention(nn.Module):
    """Attention with rotary positions, bidirectional or causal."""

    def __init__(self, width: int, *, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # (rows, heads, length, head width)
        query, key = _turned(query), _turned(key)
        # What is not there comes last, where a causal position never looks.
        seen = None if mask is None or self.causal else mask[:, None, None, :]
        gathered = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=self.causal
        )
        out: Tensor = self.out(gathered.transpose(1, 2).flatten(2))
        return out


class Convolution(nn.Module):
    """A dilated convolution, a GELU, and a linear layer."""

    def __init__(self, width: int, *, kernel: int, dilation: int, causal: bool) -> None:
        super().__init__()
        reach = (kernel - 1) * dilation
        self.padding = (reach, 0) if causal else (reach // 2, reach // 2)
        self.convolution = nn.Conv1d(width, width, kernel, dilation=dilation)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if mask is None else x * mask[..., None]
        result = self.convolution(F.pad(x.transpose(1, 2), self.padding))
        out: Tensor = self.out(F.gelu(result).transpose(1, 2))
        return out


def _mixer(config: GenomicConfig, index: int) -> HyenaOperator | Attention | Convolution:
    match config.backbone:
        case "hyena":
            return HyenaOperator(
                config.width,
                order=config.order,
                max_length=config.max_patches(config.max_length),
                causal=config.causal,
                filter_width=config.filter_width,
                filter_shift=config.filter_shift,
            )
        case "attention":
            return Attention(config.width, heads=config.head_count, causal=config.causal)
        case "cnn":
            dilation = DILATIONS[index % len(DILATIONS)]
            return Convolution(
                config.width, kernel=config.kernel, dilation=dilation, causal=config.causal
            )
        case "motif" | "published":
            raise ConfigError(f"backbone={config.backbone} has no blocks of this kind.")


def _turned(heads: Tensor) -> Tensor:
    """Apply rotary positions, in fp32."""
    half = heads.shape[-1] // 2
    dtype = torch.float64 if heads.dtype == torch.float64 else torch.float32
    rates = ROTARY_BASE ** (-torch.arange(half, device=heads.device, dtype=dtype) / half)
    angles = torch.arange(heads.shape[-2], device=heads.device, dtype=dtype)[:, None] * rates
    cosine, sine = angles.cos(), angles.sin()
    first, second = heads.to(dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(heads.dtype)
