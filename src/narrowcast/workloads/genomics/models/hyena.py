"""The Hyena operator: long convolutions and gates in the place of attention (Poli et al. 2023)."""

import torch
from torch import Tensor, nn

from narrowcast.workloads.genomics.models.convolution import Method, gated_convolution
from narrowcast.workloads.genomics.models.filters import ImplicitFilter
from narrowcast.workloads.genomics.models.short import short_convolution

SHORT = 3
"""Taps of the convolution on every projected channel."""


class HyenaOperator(nn.Module):
    """Mix positions: v ← h ∗ (x ⊙ v) + D ⊙ (x ⊙ v) for each order after the first, then a gate."""

    def __init__(
        self,
        width: int,
        *,
        order: int = 2,
        max_length: int,
        causal: bool = True,
        filter_width: int = 64,
        dropout: float = 0.0,
        method: Method | None = None,
    ) -> None:
        super().__init__()
        self.width, self.order, self.causal, self.method = width, order, causal, method
        self.project = nn.Linear(width, (order + 1) * width)
        self.short = ShortConvolution((order + 1) * width, causal=causal)
        self.filter = ImplicitFilter(
            width, max_length=max_length, causal=causal, orders=order - 1, hidden=filter_width
        )
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what each position gathers: (rows, length, width); nothing where `mask` is not."""
        projected = self.project(x)
        if mask is not None:
            projected = projected * mask[..., None]
        last, *gates, value = self.short(projected).chunk(self.order + 1, dim=1)
        filters = self.filter(x.shape[1])
        for index, gate in enumerate(reversed(gates)):
            if mask is not None:
                value = value * mask[:, None]
            value = gated_convolution(
                self.dropout(value),
                filters[index],
                bias=self.filter.bias[index],
                before=gate,
                after=last if index == len(gates) - 1 else None,
                causal=self.causal,
                method=self.method,
            )
        out: Tensor = self.out(value.transpose(1, 2))
        return out


class ShortConvolution(nn.Module):
    """Convolve each channel with three taps, and hand channels on before positions."""

    def __init__(self, channels: int, *, causal: bool) -> None:
        super().__init__()
        bound = SHORT**-0.5  # as nn.Conv1d of one channel begins
        self.weight = nn.Parameter(torch.empty(channels, SHORT).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, channels, length) of (rows, length, channels)."""
        return short_convolution(x, self.weight, self.bias, causal=self.causal)
