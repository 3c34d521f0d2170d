"""Norms, activations and rotated heads in one pass each, with the module's own as fallback."""

import functools
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.kernels.launch import PLAIN
from narrowcast.precision.plan.known_modules import (
    ROTARY,
    GatedMlp,
    RmsNorm,
    get_epsilon,
    match_rotary,
)
from narrowcast.precision.products.operands import is_transformed
from narrowcast.precision.swap import Mixin, is_watched

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Elementwise(Mixin):
    """A module with a piece that is computed as one."""

    nc_device: str
    """The type of device whose tensors the kernels take."""
    nc_compiled: bool
    """Whether a compiler gets the piece as one operator too, to fuse with nothing around it."""

    def _nc_left_alone(self) -> bool:
        if torch.compiler.is_compiling():
            return not self.nc_compiled
        return is_transformed()  # vmap, torch.func and forward derivatives are torch's own


class OnePassNorm(Elementwise):
    """A norm by the root mean square."""

    nc_norm: RmsNorm
    nc_widened: bool
    """Whether what comes in is widened to the weight's format first, and narrowed afterwards."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalise the one tensor that comes in."""
        weight: Tensor | None = self._parameters["weight"]
        assert weight is not None
        if (
            self._nc_left_alone()
            or len(args) != 1
            or kwargs
            or not _fit(self.nc_device, args[0], weight)
        ):
            return super().forward(*args, **kwargs)
        (x,), known = args, self.nc_norm
        if weight.dtype not in (torch.float32, x.dtype):
            return super().forward(*args, **kwargs)
        if known.of_torch and not _narrow_between_wide(self, x, weight):
            return super().forward(*args, **kwargs)
        from narrowcast.kernels.norms import rms_norm

        inside = weight.dtype if self.nc_widened else x.dtype
        rounds = known.rounds if weight.dtype == torch.float32 else known.rounds_to_weight_dtype
        dtype = x.dtype
        if known.promotes and not self.nc_widened:  # torch's own is all fp32 under autocast
            wide = torch.float32 if known.of_torch else weight.dtype
            dtype = torch.promote_types(x.dtype, wide)
        return rms_norm(
            x,
            weight,
            eps=get_epsilon(self),
            offset=known.offset,
            rounds=rounds and inside != torch.float32,
            dtype=dtype,
        )


class OnePassLayerNorm(Elementwise):
    """torch's layer norm of 16-bit rows, with its weights in fp32 or theirs."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    nc_widened: bool
    """Whether what came in 16 bits goes out so; else as wide as torch's autocast has it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalise the one tensor that comes in."""
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        fits = len(args) == 1 and not kwargs and _fit(self.nc_device, args[0], *own)
        if (
            self._nc_left_alone()
            or not fits
            or not _narrow_between_wide(self, args[0], self.weight)
        ):
            return super().forward(*args, **kwargs)
        from narrowcast.kernels.norms import layer_norm

        (x,) = args
        dtype = x.dtype if self.nc_widened else torch.float32
        return layer_norm(x, self.weight, self.bias, eps=self.eps, dtype=dtype)


class OnePassGelu(Elementwise):
    """A GELU that is written out in operations of torch, as the one operation that torch has."""

    nc_approximation: str
    """Torch's word for which GELU it is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Activate one tensor; under autocast, powers would be fp32 and so the result."""
        if self._nc_left_alone() or len(args) != 1 or kwargs or not _fit(self.nc_device, args[0]):
            return super().forward(*args, **kwargs)
        return F.gelu(args[0], approximate=self.nc_approximation)


class OnePassGate(Elementwise):
    """An MLP whose value is multiplied by the activation of a gate."""

    nc_mlp: GatedMlp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call its layers, with one pass over memory between them."""
        known = self.nc_mlp
        activation: Any = self._modules[known.activation_name]
        if self._nc_left_alone() or len(args) != 1 or kwargs or is_watched(activation):
            return super().forward(*args, **kwargs)
        from narrowcast.kernels.gated import gated, gated_halves

        (x,), layers = args, self._modules
        act: Any = known.activation
        gate = _called(layers[known.gate], x)
        if known.gate == known.value:
            if _fit(self.nc_device, gate):
                return _called(layers[known.down], gated_halves(gate, act))
            gate, value = gate.chunk(2, -1)
            return _called(layers[known.down], value * activation(gate))
        value = _called(layers[known.value], x)
        if _fit(self.nc_device, gate, value) and gate.dtype == value.dtype:
            return _called(layers[known.down], gated(gate, value, act))
        return _called(layers[known.down], activation(gate) * value)


class OnePassTurn(Elementwise):
    """An attention layer that turns its queries and keys in one pass."""

    nc_turning: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, with another function for what turns its heads."""
        if self._nc_left_alone():
            return super().forward(*args, **kwargs)
        return self.nc_turning(self, *args, **kwargs)


def forward_turning(module: nn.Module, device: str) -> FunctionType:
    """Return what an attention layer does, with its heads turned in one pass."""
    forward = match_rotary(module)
    assert isinstance(forward, FunctionType)
    return _turning(forward, device)


@functools.cache
def _turning(forward: FunctionType, device: str) -> FunctionType:
    """Return a forward that calls ours where it would call transformers' function."""
    theirs = forward.__globals__[ROTARY]

    def turned(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if args or kwargs or not _turns(device, q, k, cos, sin):
            result: tuple[Tensor, Tensor] = theirs(q, k, cos, sin, *args, **kwargs)
            return result
        from narrowcast.kernels.rotary import turn_halves

        return turn_halves(q, k, cos, sin)

    # The compiler looks these up by module name.
    names = {name: each for name, each in forward.__globals__.items() if name != "__name__"}
    names[ROTARY] = turned
    made = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _called(layer: nn.Module | None, x: Tensor) -> Tensor:
    assert layer is not None
    result: Tensor = layer(x)
    return result


def _fit(device: str, *tensors: Tensor) -> bool:
    """Return whether the kernels take these tensors."""
    for each in tensors:  # not all(…): with a generator in it this takes the host twice as long
        if type(each) not in PLAIN or each.dtype not in _DTYPES:
            return False
        if each.device.type != device or not each.numel():
            return False
    return True


def _narrow_between_wide(norm: OnePassNorm | OnePassLayerNorm, x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's own norm would be a pass between casts, which a kernel is not."""
    if x.shape[x.dim() - weight.dim() :] != weight.shape:
        return False
    if x.dtype == torch.float32:  # torch's own is one pass as well
        return norm.nc_compiled and weight.dtype == torch.float32
    if not norm.nc_widened and not torch.is_autocast_enabled(norm.nc_device):
        return False
    return weight.dtype in (torch.float32, x.dtype)


def _turns(device: str, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> bool:
    """Return whether the kernel turns these, heads before positions, by angles of each position."""
    if not _fit(device, query, key, cosine, sine) or query.dim() != 4 or cosine.dim() != 3:
        return False
    batch, _, length, width = query.shape
    angles = (len(cosine), *cosine.shape[1:])
    wide = torch.promote_types(query.dtype, cosine.dtype)
    # What torch would widen, attention narrows again at once where autocast is on.
    narrowed = torch.is_autocast_enabled(device)
    return (
        angles in ((1, length, width), (batch, length, width))
        and sine.shape == cosine.shape
        and key.shape[2:] == query.shape[2:]
        and key.dtype == query.dtype
        and (wide == query.dtype or narrowed)
    )
