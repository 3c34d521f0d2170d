"""Filters of any length from a small network of positions, as in HyenaDNA (Nguyen et al. 2023).

A position t, from 0 to 1 over the longest sequence, is seen as t, cos(2π f t) and −sin(2π f t) for
a few frequencies f; an MLP with sines turns that into a tap for each channel, and each channel's
taps fade at its own rate. Positions beyond the longest sequence are computed as all others are.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

BANDS = 2
"""Frequencies of a position, and so five features."""
SINE_FREQUENCY = 10.0
"""What sines are multiplied with at first; each unit learns its own."""
FADED, FAST, SLOW = 0.01, 0.3, 1.5
"""Taps of the fastest channel have fallen to a hundredth at 0.3 of the longest sequence, those of
the slowest at 1.5 of it."""


class ImplicitFilter(nn.Module):
    """Give `orders` filters for each of `width` channels, and a bias that passes letters on.

    Computed in fp32 under any policy, and therefore without linear layers, which policies give
    their format: 8 bits cannot tell neighbouring positions apart. Weights of filters do not decay
    (`filter_parameters`).
    """

    def __init__(
        self,
        width: int,
        *,
        max_length: int,
        causal: bool = True,
        orders: int = 1,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        self.shape = (orders, 1 if causal else 2, width)
        self.max_length = max_length
        sizes = [1 + 2 * BANDS, hidden, hidden, hidden]
        pairs = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList(_uniform(outs, ins, within=ins) for ins, outs in pairs)
        self.biases = nn.ParameterList(_uniform(outs, within=ins) for ins, outs in pairs)
        self.output = _uniform(math.prod(self.shape), hidden, within=hidden)
        self.frequency = nn.Parameter(torch.full((hidden,), SINE_FREQUENCY))
        self.bias = nn.Parameter(torch.randn(orders, width))

    def forward(self, length: int) -> Tensor:
        """Return filters for sequences of `length`: (orders, width, taps).

        Causal ones have `length` taps, two-sided ones 2 · length − 1 with lag 0 in the middle.
        """
        with torch.autocast(self.bias.device.type, enabled=False):
            return self._filters(length)

    def _filters(self, length: int) -> Tensor:
        dtype = torch.float64 if self.frequency.dtype == torch.float64 else torch.float32
        position = torch.arange(length, device=self.bias.device, dtype=dtype)
        time = position / max(self.max_length - 1, 1)
        x = self._features(position, time).t()  # (features, length)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.addmm(bias.to(dtype)[:, None], weight.to(dtype), x)
            x = torch.sin(self.frequency.to(dtype)[:, None] * x)
        taps: Tensor = (self.output.to(dtype) @ x).unflatten(0, self.shape)
        slow, fast = -math.log(FADED) / SLOW, -math.log(FADED) / FAST
        rates = torch.linspace(slow, fast, self.shape[-1], device=time.device, dtype=dtype)
        taps = taps * torch.exp(-rates[:, None] * time)
        if self.shape[1] == 1:
            return taps[:, 0]
        after, ahead = taps.unbind(1)
        return torch.cat([ahead[..., 1:].flip(-1), after], dim=-1)

    def _features(self, position: Tensor, time: Tensor) -> Tensor:
        bands = torch.linspace(1e-4, BANDS - 1, BANDS, device=time.device, dtype=time.dtype)
        angles = position[:, None] * (2 * math.pi / self.max_length) * bands
        return torch.cat([time[:, None], angles.cos(), -angles.sin()], dim=1)


def filter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of implicit filters, which weight decay would only blur."""
    for module in model.modules():
        if isinstance(module, ImplicitFilter):
            yield from module.parameters()


def _uniform(*shape: int, within: int) -> nn.Parameter:
    """Draw a weight as linear layers of that many inputs begin."""
    bound = within**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
