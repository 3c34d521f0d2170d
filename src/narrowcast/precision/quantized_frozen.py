"""Layers whose frozen weight is stored in e4m3: one byte per weight, and one scale per output.

The scale is a power of two, so the weight is exact in bf16 and fp32. The wide value exists only
while a product needs it. Weights of a file may have scales of 128×128 blocks instead, any numbers:
they are exact in fp32 and rounded once to bf16.
"""

import copyreg
import functools
import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, UnsupportedError
from narrowcast.kernels.fp8_groups import quantize_groups, widen_rows

Products = Literal["auto", "fp8", "wide"]
"""What a kept weight is multiplied in: as the policy says, in fp8, or never in fp8."""

_log = logging.getLogger(__name__)
_NAN = 0x7F
_PIECE = 2**24  # elements that are cast at once

LARGEST = 448 * 2.0**119
"""The largest weight that can be kept: rounded, and scaled back, it is still a number of fp32."""


@dataclass(frozen=True, kw_only=True)
class QuantizedFrozenInfo:
    """What is known of a kept weight beside its bytes."""

    dtype: torch.dtype
    """The one it came in, and is shown in."""
    transposed: bool
    """Whether the layer has its weight as (inputs, outputs)."""
    products: Products = "auto"
    snr_db: float | None = None
    """Signal-to-noise ratio of the stored weight; None if not measured."""


class QuantizedFrozenLayer(nn.Module):
    """A layer with a frozen weight in e4m3, in front of the class it had.

    Writing to `weight` (`weight.data = …`, as merging an adapter does) makes it a plain layer.
    """

    nc_plain_layer: type[nn.Module]
    """The class it had, and will have."""
    weight_e4m3: nn.Parameter  # (outputs, inputs)
    weight_scale: Tensor  # (outputs,), or one per block
    quantized: QuantizedFrozenInfo
    bias: nn.Parameter | None

    @property
    def weight(self) -> Tensor:
        """The wide value, made when it is asked for."""
        wide = widened(self.weight_e4m3, self.weight_scale, self.quantized.dtype)
        shown = (wide.t() if self.quantized.transposed else wide).as_subclass(_ShownWeight)
        shown.nc_layer = self
        return shown

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply by the wide weight, in the format of the region or of the input."""
        return self.nc_widened_product(*args, **kwargs)

    def nc_widened_product(self, x: Tensor) -> Tensor:
        """Return input · weightᵀ + bias, the weight widened to the dtype the product has."""
        dtype, device_type = x.dtype, x.device.type
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        if torch.is_autocast_enabled(device_type) and dtype in narrow:
            dtype = torch.get_autocast_dtype(device_type)
        bias = None if self.bias is None else self.bias.to(dtype)
        codes, scale = self.weight_e4m3, self.weight_scale
        if _is_transformed():
            return F.linear(x.to(dtype), widened(codes, scale, dtype), bias)
        result: Tensor = _widened_product(x.to(dtype), bias, codes, scale, False)
        return result

    def nc_widen(self, dtype: torch.dtype | None = None, *, value: Tensor | None = None) -> None:
        """Become the plain layer again, with the wide weight in a dtype, or with another value."""
        if value is None:
            value = self.weight.data.to(dtype or self.quantized.dtype).contiguous()
        for name in ("weight_e4m3", "weight_scale", "quantized"):
            delattr(self, name)
        object.__setattr__(self, "__class__", self.nc_plain_layer)
        cast(nn.Module, self).register_parameter("weight", nn.Parameter(value, requires_grad=False))

    def extra_repr(self) -> str:
        """Return how the weight is kept where the model is printed."""
        return ", ".join(filter(None, [super().extra_repr(), "weight stored in e4m3"]))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # As integers, which `.to(dtype)` leaves alone: a byte times a scale is no number by itself.
        integers = {torch.float8_e4m3fn: torch.uint8, torch.float32: torch.int32}
        own = (self.weight_e4m3, self.weight_scale)

        def on_quantized(tensor: Tensor) -> Tensor:
            if not any(tensor is each for each in own):
                return cast(Tensor, fn(tensor))
            return cast(Tensor, fn(tensor.view(integers[tensor.dtype]))).view(tensor.dtype)

        return super()._apply(on_quantized, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        codes = state_dict.get(f"{prefix}weight_e4m3")
        if isinstance(codes, Tensor) and codes.dtype == self.weight_e4m3.dtype:
            if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
                raise CheckpointError(
                    f"{prefix}weight_e4m3 contains NaN, so the file is damaged. Quantize the "
                    "weights again from the original model."
                )
            mine = self.weight_e4m3.data.view(torch.uint8)
            if codes.shape != mine.shape or not torch.equal(mine, codes.view(torch.uint8).to(mine)):
                self.quantized = replace(self.quantized, snr_db=None)  # of another weight
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy and pickle as the original class."""
        state = dict(self.__dict__)
        return _empty_layer, (self.nc_plain_layer,), state


def keep_layer(layer: nn.Module, products: Products = "auto") -> float | None:
    """Keep the weight of a linear layer in e4m3; return signal to noise in dB, if known."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    transposed = not isinstance(layer, nn.Linear)
    matrix = weight.detach().t() if transposed else weight.detach()  # (out, in)
    codes, scale, snr_db = _in_e4m3(matrix)
    stored = QuantizedFrozenInfo(
        dtype=weight.dtype, transposed=transposed, products=products, snr_db=snr_db
    )
    _store(layer, codes, scale, stored)
    return snr_db


def store_blocks(layer: nn.Linear, codes: Tensor, scale: Tensor) -> None:
    """Store codes and 128×128 block scales of a file instead of a layer's weight, unchanged."""
    device = layer.weight.device
    stored = QuantizedFrozenInfo(
        dtype=layer.weight.dtype, transposed=False, products="wide", snr_db=math.inf
    )
    _store(layer, codes.to(device), scale.to(device, torch.float32), stored)


def _store(layer: nn.Module, codes: Tensor, scale: Tensor, stored: QuantizedFrozenInfo) -> None:
    del layer.weight
    object.__setattr__(layer, "__class__", _quantized_class(cast(Any, type(layer))))
    layer.register_parameter("weight_e4m3", nn.Parameter(codes, requires_grad=False))
    layer.register_buffer("weight_scale", scale)
    layer.__dict__["quantized"] = stored


def widened(codes: Tensor, scale: Tensor, dtype: torch.dtype, *, again: bool = False) -> Tensor:
    """Return e4m3 codes times the scale of their row or block; `again` in a backward pass."""
    with torch._C.DisableTorchFunction():  # regions have nothing to say of this
        return widen_rows(codes.detach(), scale, dtype, again=again)


def _in_e4m3(matrix: Tensor) -> tuple[Tensor, Tensor, float | None]:
    """Return a matrix in e4m3, the row scales and the SNR in dB; in pieces, to save memory."""
    rows, columns = matrix.shape
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=matrix.device)
    scale = torch.empty(rows, device=matrix.device)
    if matrix.is_meta:
        return codes, scale, None
    signal = noise = torch.zeros((), dtype=torch.float64, device=matrix.device)
    step = max(_PIECE // max(columns, 1), 1)
    for begin in range(0, rows, step):
        piece = matrix[begin : begin + step].float()
        made = quantize_groups(piece, torch.float8_e4m3fn, "row", columnwise=False)
        here = slice(begin, begin + len(piece))
        # Without the rows that it is filled up with.
        codes[here], scale[here] = made.rowwise[: len(piece)], made.rowwise_scale_inv[: len(piece)]
        lost = piece - widened(codes[here], scale[here], torch.float32)
        signal, noise = signal + _square(piece), noise + _square(lost)
    lossless = not float(noise)
    return codes, scale, math.inf if lossless else 10 * math.log10(float(signal / noise))


def _square(x: Tensor) -> Tensor:
    square: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64).square()
    return square


class _WidenedProduct(torch.autograd.Function):
    """x · Wᵀ of a kept weight, or x · W: each is the derivative of the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, across: bool
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.across, ctx.has_bias = across, bias is not None
        wide = widened(codes, scale, x.dtype, again=across)
        return F.linear(x, wide.t() if across else wide, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            with torch.autocast(grad.device.type, enabled=False):
                grad_x = _widened_product(grad, None, *ctx.saved_tensors, not ctx.across)
        if ctx.has_bias and ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_bias, None, None, None


_widened_product: Any = _WidenedProduct.apply


class _ShownWeight(Tensor):
    """The wide value of a kept weight, which remembers whose it is."""

    nc_layer: QuantizedFrozenLayer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute as with any tensor, but raise for in-place writes, which would be lost."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = args[0] if args and isinstance(args[0], cls) else None
            if shown is not None and func == Tensor.data.__set__:  # type: ignore[attr-defined]
                return _written(shown.nc_layer, args[1])
            name = getattr(func, "__name__", "")
            if shown is not None and (name in _WRITING or _writes(name)):
                raise UnsupportedError(
                    "This weight is stored in e4m3 and cannot be written to. Call "
                    "narrowcast.dequantize_frozen(model, torch.bfloat16) first."
                )
            return func(*args, **(kwargs or {}))


_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def _writes(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _written(layer: QuantizedFrozenLayer, value: Tensor) -> None:
    if type(layer) is not _quantized_class(cast(Any, layer.nc_plain_layer)):
        raise UnsupportedError(
            "A weight stored in e4m3 was written to while its model is prepared. Call release() "
            "first, then merge."
        )
    layer.nc_widen(value=value.detach())
    _log.info(
        "a weight of %s that was stored in e4m3 was written to; it is now a plain weight in %s",
        tuple(value.shape),
        value.dtype,
    )


def _is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active, which knows torch's products only."""
    if torch.compiler.is_compiling():
        return False
    from torch.autograd import forward_ad

    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _empty_layer(plain: type[nn.Module]) -> QuantizedFrozenLayer:
    made = copyreg._reconstructor(_quantized_class(cast(Any, plain)), object, None)  # type: ignore[attr-defined]
    return cast(QuantizedFrozenLayer, made)


@functools.cache
def _quantized_class(plain: Any) -> type[QuantizedFrozenLayer]:
    named = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    made = type(plain.__name__, (QuantizedFrozenLayer, plain), {**named, "nc_plain_layer": plain})
    return cast("type[QuantizedFrozenLayer]", made)
