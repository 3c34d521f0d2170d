"""A forecasting network: scale each window, call the body, undo the scaling."""

from collections.abc import Mapping
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from narrowcast.workloads.forecast.heads import Head
from narrowcast.workloads.forecast.models.linear import DLinear, NLinear
from narrowcast.workloads.forecast.models.lstm import LSTMForecaster
from narrowcast.workloads.forecast.models.nhits import NHits
from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.models.transformers import InvertedTransformer, PatchTST
from narrowcast.workloads.forecast.settings import ForecastModel

SMALLEST_SPREAD = 1e-5
"""Added to the variance of a window, as RevIN does."""


Body: TypeAlias = NLinear | DLinear | NHits | PatchTST | InvertedTransformer | LSTMForecaster
"""The network between the scaled window and the numbers of the head."""


BODIES: Mapping[str, type[Body]] = {
    "nlinear": NLinear,
    "dlinear": DLinear,
    "nhits": NHits,
    "patchtst": PatchTST,
    "itransformer": InvertedTransformer,
    "lstm": LSTMForecaster,
}


@final
class ForecastNetwork(nn.Module):
    """Returns the head's numbers: windows × channels × horizon × outputs."""

    def __init__(self, settings: ForecastModel, shape: Shape, head: Head) -> None:
        super().__init__()
        self.body = BODIES[settings.name](settings, shape)
        self.normalize, self.head, self.shape = settings.get_normalize(), head, shape

    def forward(
        self,
        x: Tensor,
        past: Tensor | None = None,
        future: Tensor | None = None,
        static: Tensor | None = None,
    ) -> Tensor:
        centre, spread = window_scale(x, self.normalize)
        scaled = x if self.normalize == "none" else (x - centre) / spread
        raw = self.body(scaled, past, future, static)
        raw = raw.unflatten(-1, (self.shape.horizon, self.shape.outputs))
        return self.head.restore(raw, centre, spread)

    def gemm_rows(self, windows: int, channels: int) -> int:
        """Return the rows of its matrix products for so many windows."""
        return self.body.rows(channels) * windows


def window_scale(x: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Return centre and spread of each window: windows × channels × 1."""
    x = x.detach().float()
    one = x.new_ones(1)
    match how:
        case "last":
            return x[..., -1:], one
        case "mean":
            return x.mean(-1, keepdim=True), one
        case "standard":
            variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
            return mean, (variance + SMALLEST_SPREAD).sqrt()
        case "robust":
            median = x.median(-1, keepdim=True).values
            deviation = (x - median).abs().median(-1, keepdim=True).values
            return median, deviation + SMALLEST_SPREAD**0.5
        case _:
            return x.new_zeros(1), one


def make_network(
    settings: ForecastModel, shape: Shape, head: Head, *, seed: int, device: torch.device
) -> ForecastNetwork:
    """Return a network with weights drawn from the seed on the CPU, the same on every device."""
    with torch.random.fork_rng([]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(seed)
        return ForecastNetwork(settings, shape, head).to(device)
