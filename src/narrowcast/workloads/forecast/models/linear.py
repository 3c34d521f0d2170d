"""NLinear and DLinear (Zeng et al. 2023): one or two linear layers, shared by all channels."""

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.settings import ForecastModel


@final
class NLinear(nn.Module):
    """A linear layer from lookback to forecast; the network subtracts the last value before it."""

    def __init__(self, settings: ForecastModel, shape: Shape) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.lookback, shape.forecast)

    def forward(
        self, x: Tensor, past: Tensor | None, future: Tensor | None, static: Tensor | None
    ) -> Tensor:
        out: Tensor = self.linear(x)
        return out

    def rows(self, channels: int) -> int:
        """Return the rows of its products per window."""
        return channels


@final
class DLinear(nn.Module):
    """A linear layer for the trend, a moving average, and one for what is left."""

    def __init__(self, settings: ForecastModel, shape: Shape) -> None:
        super().__init__()
        self.kernel = settings.kernel
        self.trend = nn.Linear(shape.lookback, shape.forecast)
        self.seasonal = nn.Linear(shape.lookback, shape.forecast)
        for layer in (self.trend, self.seasonal):
            nn.init.constant_(layer.weight, 1 / shape.lookback)  # each forecast starts as the mean

    def forward(
        self, x: Tensor, past: Tensor | None, future: Tensor | None, static: Tensor | None
    ) -> Tensor:
        before = (self.kernel - 1) // 2
        padded = F.pad(x, (before, self.kernel - 1 - before), mode="replicate")
        trend = F.avg_pool1d(padded, self.kernel, stride=1)
        out: Tensor = self.trend(trend) + self.seasonal(x - trend)
        return out

    def rows(self, channels: int) -> int:
        """Return the rows of its products per window."""
        return channels
