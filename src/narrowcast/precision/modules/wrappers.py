"""What `prepare` turns modules into: the same objects, with a class of these before their own."""

import contextlib
import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cudnn.rnn import get_cudnn_mode

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import PLAIN
from narrowcast.precision.fp8.delayed import AmaxHistory
from narrowcast.precision.nested import cast_arguments, cast_first_float, first_float, map_tensors
from narrowcast.precision.products.autocast import autocast_off
from narrowcast.precision.products.emulated import linear_product
from narrowcast.precision.products.modes import sees_reductions
from narrowcast.precision.products.operands import ProductFormats, is_transformed
from narrowcast.precision.swap import Mixin


def compact_bf16(layer: nn.RNNBase) -> None:
    """Do what `flatten_parameters()` does for the bf16 weights that a layer computes with.

    torch 2.13 skips bf16 there, and then cuDNN would copy the weights in every call.
    """
    flat = layer._flat_weights
    weights = [w for w in flat if isinstance(w, Tensor) and type(w) in PLAIN]
    if torch.compiler.is_compiling() or is_transformed() or len(weights) < len(flat):
        return
    # The same question the layer asks of its input when it is called.
    if not all(w.dtype == torch.bfloat16 and torch.cudnn_is_acceptable(w) for w in weights):
        return
    distinct = len({w.data_ptr() for w in weights}) == len(weights)  # as torch asks: none is shared
    if not (distinct and torch._use_cudnn_rnn_flatten_weight()):
        return
    with torch.no_grad(), torch.cuda.device_of(weights[0]):
        torch._cudnn_rnn_flatten_weight(
            weights,
            (4 if layer.bias else 2) + (layer.proj_size > 0),
            layer.input_size,
            get_cudnn_mode(layer.mode),
            layer.hidden_size,
            layer.proj_size,
            layer.num_layers,
            layer.batch_first,
            layer.bidirectional,
        )


class EmulatedLinear(Mixin, nn.Linear):
    """A linear layer whose three products have formats of their own."""

    nc_formats: ProductFormats
    nc_history: AmaxHistory | None
    nc_autocast: str | None = None
    """The device type whose autocast is on around this layer, if one is: off, it is an island."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats."""
        if self.nc_autocast is not None and not torch.is_autocast_enabled(self.nc_autocast):
            return F.linear(input, self.weight, self.bias)
        return linear_product(
            input, self.weight, self.bias, formats=self.nc_formats, history=self.nc_history
        )

    def extra_repr(self) -> str:
        """Return the formats for `print(model)`."""
        return f"{super().extra_repr()}, {self.nc_formats}"


class Fp32Norm(Mixin):
    """A normalisation in fp32 between 16-bit neighbours."""

    nc_widens_itself: bool = False
    """Whether torch itself reads 16 bits and computes in fp32, as batch norms do on a GPU."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Widen, normalise, and return the input's format; further results stay wide."""
        x = first_float(args, kwargs)
        if x is None:
            return super().forward(*args, **kwargs)
        with autocast_off(x.device.type):
            if not (self.nc_widens_itself and self._nc_has_fp32_weights(x)):
                # A frozen norm that came in 16 bits computes as it would where it came from.
                own = _first_parameter(self)
                wide = torch.float32 if own is None else own.dtype
                args, kwargs = cast_arguments(args, kwargs, wide)
            return cast_first_float(super().forward(*args, **kwargs), x.dtype)

    def _nc_has_fp32_weights(self, x: Tensor) -> bool:
        """Return whether fp32 weights or statistics make torch compute 16-bit inputs in fp32."""
        extra: Tensor | None = self._parameters.get("weight")
        if extra is None:
            extra = self._buffers.get("running_mean")
        if extra is None or extra.dtype != torch.float32 or is_transformed():
            return False
        return x.dtype in (torch.bfloat16, torch.float16)


class RoundedNorm(Mixin):
    """A normalisation whose input and result are rounded to a 16-bit format."""

    nc_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Round, normalise with fp32 sums, round."""
        x = first_float(args, kwargs)
        if x is None:
            return super().forward(*args, **kwargs)
        # A mode that sees the sums leaves them in fp32, which without autocast would be an island.
        off = contextlib.nullcontext() if sees_reductions() else autocast_off(x.device.type)
        with off:
            own = _first_parameter(self)
            args, kwargs = cast_arguments(args, kwargs, self.nc_dtype)
            args, kwargs = cast_arguments(args, kwargs, (x if own is None else own).dtype)
            rounded = cast_first_float(super().forward(*args, **kwargs), self.nc_dtype)
            return cast_first_float(rounded, x.dtype)


class MatchingInput(Mixin):
    """A layer that takes inputs in the format of its weights, whatever they come in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating-point arguments to the dtype of the weights."""
        own = _first_parameter(self)
        assert own is not None
        args, kwargs = cast_arguments(args, kwargs, own.dtype)
        return super().forward(*args, **kwargs)


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return what `parameters()` yields first, which is slow to say of a module's own."""
    for each in module._parameters.values():
        if each is not None:
            return each
    return next(module.parameters(), None)


class NarrowBilinear(Mixin, nn.Bilinear):
    """A bilinear layer in the format of its autocast, which on a CPU does not know it."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Multiply in that format; inside `autocast_disabled`, in the format of the weights."""
        kind, dtype = self.weight.device.type, self.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.bilinear(input1.to(dtype), input2.to(dtype), self.weight.to(dtype), bias)


class Bf16Recurrent(Mixin):
    """A recurrent layer in bf16 on a GPU, where torch's autocast would take fp16."""

    _flat_weights: list[Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Multiply weights and inputs in bf16; on an island, as they are."""
        weights = self._flat_weights
        if not torch.is_autocast_enabled(weights[0].device.type):
            return super().forward(*args, **kwargs)
        args, kwargs = cast_arguments(args, kwargs, torch.bfloat16)
        with torch.autocast(weights[0].device.type, enabled=False):
            self._flat_weights = [weight.to(torch.bfloat16) for weight in weights]
            try:
                if all(weight.dtype != torch.bfloat16 for weight in weights):  # all are casts
                    compact_bf16(cast(nn.RNNBase, self))
                return super().forward(*args, **kwargs)
            finally:
                self._flat_weights = weights


class Untraced(Mixin):
    """A recurrent layer that `torch.compile` leaves to torch.

    By itself it falls back too, but then compiles what they call, with guards checked every step,
    and torch 2.13 mistakes a dtype for a number under a function mode.
    """

    @classmethod
    def nc_namespace(cls, plain: Any) -> dict[str, Any]:
        """Register with the compiler at the first such layer: importing it takes seconds."""
        _tell_the_compiler()
        return super().nc_namespace(plain)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer unchanged."""
        return super().forward(*args, **kwargs)


@functools.cache
def _tell_the_compiler() -> None:
    forward = torch.compiler.disable(Untraced.forward)
    Untraced.forward = forward  # type: ignore[method-assign]


class WithoutFastPath(Mixin):
    """An encoder layer of torch without its fast path, which ignores formats.

    torch does not take it under autocast, but on a CPU, or compiled, it does not check.
    """

    @property
    def activation_relu_or_gelu(self) -> int:
        """Return 0, so that torch does not take the fast path."""
        return 0


class OwnLossScale(Mixin):
    """A part of the model inside which gradients are multiplied by a further scale.

    The factor is applied to gradients at the outputs and removed at the inputs.
    """

    nc_scale: Any  # anything with a `.value` tensor; typed loosely to keep layers apart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scale gradients on their way in, and back on their way out."""
        factor = self.nc_scale.value
        (args, kwargs), _ = _scale_gradients((args, kwargs), 1 / factor)
        output = super().forward(*args, **kwargs)
        scaled, result = _scale_gradients(output, factor)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if trained and not result:
            raise UnsupportedError(
                f"A {type(self).__name__} in scale_groups must return tensors that require grad, "
                f"got {type(output).__name__}. Return a tensor, or a tuple, list or dict of "
                "tensors."
            )
        return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.factor).to(grad.dtype), None


_scale_gradient: Any = _ScaleGradient.apply


def _scale_gradients(value: Any, factor: Tensor) -> tuple[Any, int]:
    """Return the value with its gradients scaled, and how many tensors in it have any."""
    scaled: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        scaled.append(tensor)
        return cast(Tensor, _scale_gradient(tensor, factor))

    return map_tensors(value, change), len(scaled)
