"""N-HiTS (Challu et al. 2022): stacks that read and forecast at different rates."""

import itertools
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.settings import ForecastModel


@final
class NHits(nn.Module):
    """A sum of forecasts; each stack subtracts what it explains from the next one's input."""

    def __init__(self, settings: ForecastModel, shape: Shape) -> None:
        super().__init__()
        rates = zip(settings.pools, settings.downsample, strict=True)
        last = len(settings.pools) - 1
        self.stacks = nn.ModuleList(
            Stack(settings, shape, pool=pool, rate=rate, backcast=number < last)
            for number, (pool, rate) in enumerate(rates)
        )

    def forward(
        self, x: Tensor, past: Tensor | None, future: Tensor | None, static: Tensor | None
    ) -> Tensor:
        windows, channels, _ = x.shape
        known = [part.flatten(1) for part in (past, future, static) if part is not None]
        extra = None
        if known:
            extra = torch.cat(known, dim=1)[:, None].expand(-1, channels, -1).flatten(0, 1)
        residual = x.flatten(0, 1)
        total = residual[:, -1:, None]  # the naive forecast, as in the reference implementation
        for stack in self.stacks:
            backcast, forecast = stack(residual, extra)
            total = total + forecast
            if stack.backcast:
                residual = residual - backcast
        return total.reshape(windows, channels, -1)

    def rows(self, channels: int) -> int:
        """Return the rows of its products per window."""
        return channels


@final
class Stack(nn.Module):
    """Max-pool the input, and forecast a few coefficients that are interpolated to all rows."""

    interpolation: Tensor

    def __init__(
        self, settings: ForecastModel, shape: Shape, *, pool: int, rate: int, backcast: bool
    ) -> None:
        super().__init__()
        lookback, horizon = shape.lookback, shape.horizon
        width, layers, dropout = settings.get_width(), settings.get_layers(), settings.get_dropout()
        extra = shape.past * lookback + shape.future * (lookback + horizon) + shape.static
        self.pool, self.outputs = min(pool, lookback), shape.outputs
        self.backcast = lookback if backcast else 0  # nothing follows the last stack
        self.knots = max(horizon // rate, 1)
        sizes = [-(-lookback // self.pool) + extra, *[width] * layers]
        parts = list[nn.Module]()
        for before, after in itertools.pairwise(sizes):
            parts += [nn.Linear(before, after), nn.ReLU()]
            if dropout:
                parts.append(nn.Dropout(dropout))
        self.mlp = nn.Sequential(*parts)
        self.coefficients = nn.Linear(width, self.backcast + self.knots * self.outputs)
        if self.knots < horizon:
            unit = torch.eye(self.knots, device="cpu")[None]
            matrix = F.interpolate(unit, size=horizon, mode="linear")[0]
            self.register_buffer("interpolation", matrix, persistent=False)
        self.interpolated = self.knots < horizon

    def forward(self, x: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        pooled = x if self.pool == 1 else F.max_pool1d(x, self.pool, ceil_mode=True)
        hidden = self.mlp(pooled if extra is None else torch.cat([pooled, extra], dim=1))
        numbers = self.coefficients(hidden)
        knots = numbers[:, self.backcast :].unflatten(1, (self.knots, self.outputs))
        forecast = knots
        if self.interpolated:
            forecast = torch.einsum("nko,kh->nho", knots.float(), self.interpolation)
        return numbers[:, : self.backcast], forecast
