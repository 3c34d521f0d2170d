"""The Hyena operator (Poli et al. 2023), implicit filters as in HyenaDNA (Nguyen et al. 2023)."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import unsupported_reason
from narrowcast.workloads.genomics.models.convolution import Method, gated_convolution

BANDS = 2
"""Frequencies of the positional features: t, and cos and sin of each."""
SINE_FREQUENCY = 10.0
"""Initial frequency of the sine activations, which is learnt per unit."""
FADED, FAST, SLOW = 0.01, 0.3, 1.5
"""The fastest channel decays to 0.01 at 0.3 of the longest sequence, the slowest at 1.5."""


SHORT = 3
"""Taps of the short convolution."""


class ImplicitFilter(nn.Module):
    """Generates long filters from positions by an MLP with sine activations and a decay.

    Has no linear layers, which policies would cast: 8 bits cannot separate neighbouring positions.
    """

    runs_in_fp32 = True

    def __init__(
        self,
        width: int,
        *,
        max_length: int,
        causal: bool = True,
        orders: int = 1,
        hidden: int = 64,
        shift: float = 0.0,
    ) -> None:
        super().__init__()
        self.shift = shift
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
        """Return (orders, width, taps): `length` taps if causal, else 2 · length - 1."""
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
        taps = taps * (torch.exp(-rates[:, None] * time) + self.shift)
        if self.shape[1] == 1:
            return taps[:, 0]
        after, ahead = taps.unbind(1)
        return torch.cat([ahead[..., 1:].flip(-1), after], dim=-1)

    def _features(self, position: Tensor, time: Tensor) -> Tensor:
        bands = torch.linspace(1e-4, BANDS - 1, BANDS, device=time.device, dtype=time.dtype)
        angles = position[:, None] * (2 * math.pi / self.max_length) * bands
        return torch.cat([time[:, None], angles.cos(), -angles.sin()], dim=1)


def filter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of implicit filters, which get no weight decay."""
    for module in model.modules():
        if isinstance(module, ImplicitFilter):
            yield from module.parameters()


def _uniform(*shape: int, within: int) -> nn.Parameter:
    """Return a parameter initialised like a linear layer of `within` inputs."""
    bound = within**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class HyenaOperator(nn.Module):
    """v ← h ∗ (x ⊙ v) + D ⊙ (x ⊙ v) for each order after the first, then a gate."""

    def __init__(
        self,
        width: int,
        *,
        order: int = 2,
        max_length: int,
        causal: bool = True,
        filter_width: int = 64,
        filter_shift: float = 0.0,
        dropout: float = 0.0,
        method: Method | None = None,
    ) -> None:
        super().__init__()
        self.width, self.order, self.causal, self.method = width, order, causal, method
        self.project = nn.Linear(width, (order + 1) * width)
        self.short = ShortConvolution((order + 1) * width, causal=causal)
        self.filter = ImplicitFilter(
            width,
            max_length=max_length,
            causal=causal,
            orders=order - 1,
            hidden=filter_width,
            shift=filter_shift,
        )
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, width)

    def start(self, x: Tensor, room: int) -> tuple[Tensor, "HyenaState"]:
        """Return the output of causal `x`, and the state to continue it by `room` letters."""
        projected = self.project(x)
        last, *gates, value = self.short(projected).chunk(self.order + 1, dim=1)
        length = x.shape[1]
        filters, gated = self.filter(length + room), list[Tensor]()
        for index, gate in enumerate(reversed(gates)):
            gated.append(F.pad(gate * value, (0, room)))
            value = gated_convolution(
                value,
                filters[index],
                bias=self.filter.bias[index],
                before=gate,
                after=last if index == len(gates) - 1 else None,
                method=self.method,
            )
        recent = F.pad(projected, (0, 0, SHORT - 1, 0))[:, -(SHORT - 1) :]
        state = HyenaState(recent=recent, gated=gated, filters=filters.flip(-1), length=length)
        out: Tensor = self.out(value.transpose(1, 2))
        return out, state

    def step(self, x: Tensor, state: "HyenaState") -> Tensor:
        """Return the output of the next letter, (rows, 1, width), and move the state on by it."""
        window = torch.cat([state.recent, self.project(x)], 1)
        state.recent = window[:, 1:]
        short = (window * self.short.weight.t()).sum(1) + self.short.bias
        last, *gates, value = short.chunk(self.order + 1, dim=1)
        at = state.length
        for index, gate in enumerate(reversed(gates)):
            value = gate * value
            state.gated[index][..., at] = value
            # Flipped filters end at lag 0.
            taps = state.filters[index, :, state.filters.shape[-1] - at - 1 :]
            past = state.gated[index][..., : at + 1].to(taps.dtype)
            convolved = (past * taps).sum(-1) + self.filter.bias[index] * value
            value = convolved.to(value.dtype)
        state.length += 1
        out: Tensor = self.out((last * value)[:, None])
        return out

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
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


@final
@dataclass(kw_only=True)
class HyenaState:
    """What a causal operator has read, for the letters that follow."""

    recent: Tensor
    """Projections of the last letters, which the short convolution reads."""
    gated: list[Tensor]
    """Inputs of each long convolution, (rows, width, letters), with room for more."""
    filters: Tensor
    """Filters, from the longest lag to 0."""
    length: int


class ShortConvolution(nn.Module):
    """Depthwise convolution of three taps that returns channels first."""

    def __init__(self, channels: int, *, causal: bool) -> None:
        super().__init__()
        bound = SHORT**-0.5  # as nn.Conv1d of one channel begins
        self.weight = nn.Parameter(torch.empty(channels, SHORT).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        return short_convolution(x, self.weight, self.bias, causal=self.causal)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor, *, causal: bool) -> Tensor:
    """Return (rows, channels, length); the last tap is the position itself if `causal`."""
    left = 2 if causal else 1
    if x.device.type == "cpu" or x.dtype == torch.float64:
        padded = F.pad(x.transpose(1, 2), (left, 2 - left))
        return F.conv1d(padded, weight[:, None], bias, groups=len(bias))
    result: Tensor = _apply(x, weight, bias, left)
    return result


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, left: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.left = left
        result: Tensor = torch.ops.narrowcast.short_convolution(x, weight, bias, left)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.narrowcast.short_convolution_backward(grad, *ctx.saved_tensors, ctx.left)
        return *grads, None


_apply: Any = _ShortConvolution.apply


def _forward(x: Tensor, weight: Tensor, bias: Tensor, left: int) -> Tensor:
    if unsupported_reason(x.device):
        padded = F.pad(x.transpose(1, 2), (left, 2 - left))
        taps = weight[:, None].to(x.dtype)
        return F.conv1d(padded, taps, bias.to(x.dtype), groups=len(bias)).contiguous()
    from narrowcast.workloads.genomics.models.kernels.short import short_forward

    return short_forward(x, weight, bias, left)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    if unsupported_reason(x.device):
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
            out = _forward(inputs[0], inputs[1], inputs[2], left)
        to_x, to_weight, to_bias = torch.autograd.grad(out, inputs, grad)
        return to_x.contiguous(), to_weight.contiguous(), to_bias.contiguous()
    from narrowcast.workloads.genomics.models.kernels.short import short_backward

    to_x, to_weight, to_bias = short_backward(grad, x, weight, left)
    return to_x, to_weight.contiguous(), to_bias.contiguous()


def _empty(x: Tensor, weight: Tensor, bias: Tensor, left: int) -> Tensor:
    rows, length, channels = x.shape
    return x.new_empty((rows, channels, length))


def _empty_grads(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "short_convolution(Tensor x, Tensor weight, Tensor bias, int left) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "short_convolution_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, int left)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("short_convolution", _forward, "CompositeExplicitAutograd")
_library.impl("short_convolution_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::short_convolution", _empty)
torch.library.register_fake("narrowcast::short_convolution_backward", _empty_grads)
