"""Networks of the zoo in plain torch, from an LSTM to a diffusion transformer."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 32
"""Of a group norm, as in diffusion models."""


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM, linear layer: logits of the next token."""

    def __init__(self, vocab: int, width: int, *, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, length, vocab)."""
        logits: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return logits


class EncoderClassifier(nn.Module):
    """torch's own encoder, and a class for each position."""

    def __init__(self, width: int, *, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (batch, length, classes), of (batch, length, width)."""
        logits: Tensor = self.head(self.encoder(x))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions with norms before them; the time of diffusion is added between them."""

    def __init__(self, width_in: int, width_out: int, *, time_width: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(min(GROUPS, width_in), width_in)
        self.conv_in = nn.Conv2d(width_in, width_out, 3, padding=1)
        self.time = nn.Linear(time_width, width_out)
        self.norm_out = nn.GroupNorm(min(GROUPS, width_out), width_out)
        self.conv_out = nn.Conv2d(width_out, width_out, 3, padding=1)
        same = width_in == width_out
        self.skip: nn.Module = nn.Identity() if same else nn.Conv2d(width_in, width_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return (batch, width_out, height, width)."""
        inner = self.conv_in(F.silu(self.norm_in(x))) + self.time(time)[:, :, None, None]
        out: Tensor = self.skip(x) + self.conv_out(F.silu(self.norm_out(inner)))
        return out


class PixelAttention(nn.Module):
    """Attention among all pixels of an image."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(min(GROUPS, width), width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, *size = x.shape
        pixels = self.norm(x).flatten(2).transpose(1, 2)  # (batch, pixel, width)
        shape = (batch, pixels.shape[1], 3, self.heads, width // self.heads)
        query, key, value = self.qkv(pixels).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        out: Tensor = x + self.out(attended).transpose(1, 2).reshape(batch, width, *size)
        return out


class UNet(nn.Module):
    """Predicts the noise in images; one width per resolution, attention at the lowest."""

    def __init__(self, widths: Sequence[int], *, channels: int = 3, heads: int = 4) -> None:
        super().__init__()
        first, time_width = widths[0], 4 * widths[0]
        time_setting = {"time_width": time_width}
        self.time = nn.Sequential(
            nn.Linear(first, time_width), nn.SiLU(), nn.Linear(time_width, time_width), nn.SiLU()
        )
        self.enter = nn.Conv2d(channels, first, 3, padding=1)
        pairs = list(zip([first, *widths], widths, strict=False))
        self.down = nn.ModuleList(ResidualBlock(a, b, **time_setting) for a, b in pairs)
        self.halve = nn.ModuleList(nn.Conv2d(b, b, 3, stride=2, padding=1) for _, b in pairs[:-1])
        last = widths[-1]
        self.middle = nn.ModuleList(
            [ResidualBlock(last, last, **time_setting), PixelAttention(last, heads=heads)]
        )
        self.up = nn.ModuleList(ResidualBlock(2 * b, a, **time_setting) for a, b in reversed(pairs))
        self.leave = nn.Sequential(
            nn.GroupNorm(min(GROUPS, first), first),
            nn.SiLU(),
            nn.Conv2d(first, channels, 3, padding=1),
        )

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        """Return the noise of (batch, channels, height, width) at times of (batch, first)."""
        time = self.time(time)
        x, skips = self.enter(images), []
        for index, block in enumerate(self.down):
            x = block(x, time)
            skips.append(x)
            if index < len(self.halve):
                x = self.halve[index](x)
        residual, attention = self.middle
        x = attention(residual(x, time))
        for index, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], 1), time)
            if index < len(self.halve):
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        out: Tensor = self.leave(x)
        return out


class DiffusionBlock(nn.Module):
    """Attention and MLP whose norms are scaled, shifted and gated by the time (adaLN-zero)."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        batch, length, width = x.shape
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(time)[:, None].chunk(
            6, dim=-1
        )
        inner = self.norms[0](x) * (1 + scale) + shift
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(inner).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + gate * self.out(attended)
        inner = self.norms[1](x) * (1 + scale_mlp) + shift_mlp
        out: Tensor = x + gate_mlp * self.mlp(inner)
        return out


class DiffusionTransformer(nn.Module):
    """DiT: predicts the noise in latents, in patches of 2 × 2."""

    def __init__(
        self, width: int, *, layers: int, heads: int, channels: int = 4, size: int = 32
    ) -> None:
        super().__init__()
        self.size = size
        self.enter = nn.Conv2d(channels, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // 2) ** 2, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads=heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, 4 * channels)

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        """Return the noise of (batch, channels, size, size) at times of (batch, 256)."""
        x = self.enter(latents).flatten(2).transpose(1, 2) + self.position
        time = self.time(time)
        for block in self.blocks:
            x = block(x, time)
        patches = self.leave(self.norm(x)).transpose(1, 2)
        side = self.size // 2
        out: Tensor = F.pixel_shuffle(patches.reshape(len(x), -1, side, side), 2)
        return out


class Recommender(nn.Module):
    """DLRM: embeddings and dense features meet in dot products of each pair."""

    def __init__(self, rows: Sequence[int], width: int, *, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.bottom = nn.Sequential(
            nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        count = len(rows) + 1
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)
        self.top = nn.Sequential(
            nn.Linear(width + count * (count - 1) // 2, 2 * hidden),
            nn.ReLU(),
            nn.Linear(2 * hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.pairs: Tensor

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return logits of a click for (batch, dense) and (batch, tables)."""
        bottom = self.bottom(dense)
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *embedded], dim=1)
        dots = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([bottom, dots], dim=1))
        return logits[:, 0]


class GraphNetwork(nn.Module):
    """Messages along edges are averaged at each node (GraphSAGE)."""

    def __init__(self, inputs: int, width: int, *, layers: int, classes: int) -> None:
        super().__init__()
        widths = [inputs] + [width] * layers
        pairs = list(pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.neighbours = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.LayerNorm(b) for _, b in pairs)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return logits of (nodes, inputs) with edges of (2, count), from and to."""
        source, target = edges
        degree = torch.zeros(len(x), 1, device=x.device)
        degree = degree.index_add(0, target, torch.ones_like(degree)[target]).clamp(min=1)
        for own, neighbours, norm in zip(self.own, self.neighbours, self.norms, strict=True):
            total = torch.zeros_like(x).index_add(0, target, x[source])
            x = F.relu(norm(own(x) + neighbours(total / degree.to(x.dtype))))
        logits: Tensor = self.head(x)
        return logits


class TabularNetwork(nn.Module):
    """A residual MLP with batch norm, for rows of a table."""

    def __init__(self, features: int, width: int, *, layers: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(width),
                nn.Linear(width, 2 * width),
                nn.ReLU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(layers)
        )
        self.leave = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.leave(x)
        return logits


class ActorCritic(nn.Module):
    """Convolutions over four stacked screens, then logits of actions and a value."""

    def __init__(self, *, width: int, actions: int, size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        side = ((size - 8) // 4 + 1 - 4) // 2 + 1 - 2
        self.hidden = nn.Sequential(nn.Linear(64 * side * side, width), nn.ReLU())
        self.policy, self.value = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, screens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(self.body(screens))
        return self.policy(hidden), self.value(hidden)[:, 0]
