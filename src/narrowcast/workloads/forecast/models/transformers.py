"""PatchTST (Nie et al. 2023) and iTransformer (Liu et al. 2024)."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.settings import ForecastModel


@final
class PatchTST(nn.Module):
    """A transformer over patches of one channel, the same for all channels.

    Unlike the reference implementation, a layer's attention scores are not added to the next
    layer's, so that fused attention kernels can be used.
    """

    def __init__(self, settings: ForecastModel, shape: Shape) -> None:
        super().__init__()
        lookback, width, stride = shape.lookback, settings.get_width(), settings.patch_stride
        self.patch, self.stride = min(settings.patch, lookback), stride
        tokens = (lookback - self.patch) // stride + 2  # one more by repeating the last value
        self.tokens = tokens
        self.embed = nn.Linear(self.patch, width)
        self.position = nn.Parameter(torch.empty(tokens, width).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(settings.get_dropout())
        self.blocks = make_blocks(settings, batch_norm=True)
        self.forecast = nn.Linear(tokens * width, shape.forecast)

    def forward(
        self, x: Tensor, past: Tensor | None, future: Tensor | None, static: Tensor | None
    ) -> Tensor:
        windows, channels, _ = x.shape
        padded = F.pad(x.flatten(0, 1), (0, self.stride), mode="replicate")
        patches = padded.unfold(1, self.patch, self.stride)
        hidden = self.dropout(self.embed(patches) + self.position)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.forecast(hidden.flatten(1))
        return out.reshape(windows, channels, -1)

    def rows(self, channels: int) -> int:
        """Return the rows of its products per window."""
        return channels * self.tokens


@final
class InvertedTransformer(nn.Module):
    """A transformer with one token per channel, so that attention relates channels."""

    def __init__(self, settings: ForecastModel, shape: Shape) -> None:
        super().__init__()
        lookback, width = shape.lookback, settings.get_width()
        self.embed = nn.Linear(lookback, width)
        # Exogenous columns are further tokens; what is known ahead has more rows.
        self.embed_past = nn.Linear(lookback, width) if shape.past else None
        rows = lookback + shape.horizon
        self.embed_future = nn.Linear(rows, width) if shape.future else None
        self.dropout = nn.Dropout(settings.get_dropout())
        self.blocks = make_blocks(settings, batch_norm=False)
        self.norm = nn.LayerNorm(width)
        self.forecast = nn.Linear(width, shape.forecast)

    def forward(
        self, x: Tensor, past: Tensor | None, future: Tensor | None, static: Tensor | None
    ) -> Tensor:
        tokens = [self.embed(x)]
        if self.embed_past is not None:
            tokens.append(self.embed_past(past))
        if self.embed_future is not None:
            tokens.append(self.embed_future(future))
        hidden = self.dropout(torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0])
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.forecast(self.norm(hidden[:, : x.shape[1]]))
        return out

    def rows(self, channels: int) -> int:
        """Return the rows of its products per window."""
        return channels


def make_blocks(settings: ForecastModel, *, batch_norm: bool) -> nn.ModuleList:
    """Return the layers of a transformer."""
    return nn.ModuleList(
        Block(settings, batch_norm=batch_norm) for _ in range(settings.get_layers())
    )


@final
class Block(nn.Module):
    """Attention and an MLP, each followed by dropout, the residual and a norm."""

    def __init__(self, settings: ForecastModel, *, batch_norm: bool) -> None:
        super().__init__()
        width, self.heads = settings.get_width(), settings.get_heads()
        mlp_width = settings.mlp_width or 2 * width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, mlp_width), nn.Linear(mlp_width, width)
        self.dropout = nn.Dropout(settings.get_dropout())
        self.norms = nn.ModuleList(
            BatchNormOfTokens(width) if batch_norm else nn.LayerNorm(width) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = self.norms[0](x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        hidden = self.dropout(F.gelu(self.up(x)))
        out: Tensor = self.norms[1](x + self.dropout(self.down(hidden)))
        return out


@final
class BatchNormOfTokens(nn.BatchNorm1d):
    """BatchNorm over windows and tokens, with the width last."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        return super().forward(input.flatten(0, 1)).view_as(input)
