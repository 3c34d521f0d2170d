"""An LSTM that reads the lookback, and an MLP that forecasts all rows from its last state."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.settings import ForecastModel

CONTEXT = 16
"""Numbers per forecast row that carry the state to the decoder."""


@final
class LSTMForecaster(nn.Module):
    """Exogenous columns are inputs of the LSTM; those known ahead also of the decoder."""

    def __init__(self, settings: ForecastModel, shape: Shape) -> None:
        super().__init__()
        self.horizon = shape.horizon
        width, layers = settings.get_width(), settings.get_layers()
        # torch warns of dropout between the layers of a single one.
        dropout = settings.get_dropout() if layers > 1 else 0.0
        inputs = 1 + shape.past + shape.future + shape.static
        self.lstm = nn.LSTM(inputs, width, layers, batch_first=True, dropout=dropout)
        self.context = nn.Linear(width, shape.horizon * CONTEXT)
        self.hidden = nn.Linear(CONTEXT + shape.future, CONTEXT)
        self.out = nn.Linear(CONTEXT, shape.outputs)

    def forward(
        self, x: Tensor, past: Tensor | None, future: Tensor | None, static: Tensor | None
    ) -> Tensor:
        windows, channels, lookback = x.shape
        inputs = [x.flatten(0, 1)[..., None]]
        if past is not None:
            inputs.append(_per_channel(past.mT, channels))
        if future is not None:
            inputs.append(_per_channel(future[..., :lookback].mT, channels))
        if static is not None:
            inputs.append(_per_channel(static[:, None].expand(-1, lookback, -1), channels))
        states, _ = self.lstm(torch.cat(inputs, dim=-1) if len(inputs) > 1 else inputs[0])
        context = self.context(states[:, -1]).unflatten(-1, (self.horizon, CONTEXT))
        if future is not None:
            ahead = _per_channel(future[..., lookback:].mT, channels)
            context = torch.cat([context, ahead.to(context.dtype)], dim=-1)
        out: Tensor = self.out(F.relu(self.hidden(context)))
        return out.reshape(windows, channels, -1)

    def rows(self, channels: int) -> int:
        """Return the rows of its products per window."""
        return channels * self.horizon


def _per_channel(rows: Tensor, channels: int) -> Tensor:
    """Return windows × rows × columns once per channel of a window."""
    return rows[:, None].expand(-1, channels, -1, -1).flatten(0, 1)
