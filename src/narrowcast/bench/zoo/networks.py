"""Networks of the zoo in plain torch: a U-Net, an LSTM language model, an encoder."""

from collections.abc import Sequence

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
