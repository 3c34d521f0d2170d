"""Scale, cast to fp8 and transpose a matrix in one read of it.

fp8 products need both operands contiguous along the summed dimension, so an activation is needed in
both layouts. Rows are padded with zeros to a multiple of 16.
"""

import functools
import importlib
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from types import ModuleType
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.kernels.launch import unsupported_reason

MULTIPLE = 16
"""cuBLAS asks it of every dimension of an fp8 product, the summed one included."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# Half of the smallest value, which rounds to zero.
_FLUSHED = {448.0: 2.0**-10, 57344.0: 2.0**-17}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "gated_silu": F.silu,
    "gated_gelu": F.gelu,
    "gated_gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Activations of a gate, by what `quantize` calls its product with what it lets through."""


@final
class DecidedScales:
    """Addresses of the scales that are set, which the host knows without a synchronisation."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def __contains__(self, scale_inv: Tensor) -> bool:
        return scale_inv.data_ptr() in self._addresses

    def add(self, scale_inv: Tensor) -> None:
        self._addresses.add(scale_inv.data_ptr())

    def first_use(self, scale_inv: Tensor) -> bool:
        """Return whether the matrix at hand decides a scale, which is decided from then on."""
        address = scale_inv.data_ptr()
        if address in self._addresses:
            return False
        self._addresses.add(address)
        return True

    def among(self, addresses: AbstractSet[int]) -> frozenset[int]:
        return frozenset(self._addresses & addresses)

    def remove(self, addresses: AbstractSet[int]) -> None:
        """Let the next matrices set the scales at these addresses."""
        self._addresses.difference_update(addresses)


DECIDED = DecidedScales()


class Quantized(NamedTuple):
    """A matrix in fp8, in one or both layouts; a layout that is not needed is empty."""

    rowwise: Tensor
    """(rows, columns)"""
    columnwise: Tensor
    """(columns, rows)"""
    rowwise_scale_inv: Tensor
    """fp32 powers of two: one, or one for each row, or block, of this layout."""
    columnwise_scale_inv: Tensor

    @property
    def scale_inv(self) -> Tensor:
        """The one scale of a matrix that is scaled as a whole."""
        return self.rowwise_scale_inv


def quantize(
    x: Tensor,
    target: torch.dtype,
    *,
    scale_inv: Tensor | None = None,
    cast_stats: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    activation: str = "",
    second: Tensor | None = None,
) -> Quantized:
    """Return a matrix in fp8, in one or both layouts; inf and NaN become NaN.

    Without `scale_inv` the scale is the largest power of two that keeps every value. With it,
    larger values saturate. `cast_stats` are four int32: the bits of the largest magnitude, and
    counts of sampled (about one in seven), saturated and flushed values.
    """
    ops, how = torch.ops.narrowcast, (cast_stats, rowwise, columnwise, activation, second)
    if not torch.compiler.is_compiling():
        in_rows, in_columns, used = _made(x, target, scale_inv, *how)
    elif scale_inv is None:
        in_rows, in_columns, used = ops.quantize_fp8(x, target, *how)
    else:
        (in_rows, in_columns), used = ops.quantize_fp8_by(x, target, scale_inv, *how), scale_inv
    return Quantized(in_rows, in_columns, used, used)


def quantize_into(
    into: Quantized, x: Tensor, *, cast_stats: Tensor | None, by_itself: bool
) -> None:
    """Quantise into `into`; `by_itself` or an undecided scale: with a scale of this matrix."""
    if not by_itself:
        by_itself = DECIDED.first_use(into.scale_inv)
    work = _by_triton if not unsupported_reason(x.device) else _plainly
    largest = LARGEST[into.rowwise.dtype]
    scale, rows, columns = into.scale_inv, into.rowwise, into.columnwise
    work(x.contiguous(), rows, columns, scale, cast_stats, by_itself, largest, "", None)


def scale_inv_for(amax: Tensor, largest: Tensor | float) -> Tensor:
    """Return inverse powers of two that keep `amax` within `largest`; 1 for 0, inf or NaN."""
    mantissa, exponent = torch.frexp(amax)
    # Both formats end at 1.75 · 2ⁿ. As exponents, where a division would round.
    top = torch.frexp(torch.as_tensor(largest, device=amax.device)).exponent
    power = (top - exponent - (mantissa > 0.875).int()).clamp(-126, 126)
    return torch.where((amax > 0) & amax.isfinite(), torch.ldexp(torch.ones_like(amax), -power), 1)


def castable(value: Tensor, scale_inv: Tensor, largest: float) -> Tensor:
    """Return values scaled and saturated; what is not finite becomes NaN."""
    return (value / scale_inv).clamp(-largest, largest) + value * 0


def _quantize(
    x: Tensor,
    target: torch.dtype,
    cast_stats: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    activation: str,
    second: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _made(x, target, None, cast_stats, rowwise, columnwise, activation, second)


def _quantize_by(
    x: Tensor,
    target: torch.dtype,
    scale_inv: Tensor,
    cast_stats: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    activation: str,
    second: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what an operator may: no tensor that it was given."""
    return _made(x, target, scale_inv, cast_stats, rowwise, columnwise, activation, second)[:2]


def _made(
    x: Tensor,
    target: torch.dtype,
    scale_inv: Tensor | None,
    cast_stats: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    activation: str,
    second: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    second = None if second is None else second.contiguous()
    count, width = x.shape
    padded = count + -count % MULTIPLE
    in_rows = torch.empty((padded, width) if rowwise else 0, dtype=target, device=x.device)
    in_columns = torch.empty((width, padded) if columnwise else 0, dtype=target, device=x.device)
    used = scale_inv
    if used is None:
        used = torch.empty(1, dtype=torch.float32, device=x.device)
    if not x.numel():
        return in_rows, in_columns, used.fill_(1) if scale_inv is None else used
    by_itself = scale_inv is None or DECIDED.first_use(scale_inv)
    work = _by_triton if not unsupported_reason(x.device) else _plainly
    work(x, in_rows, in_columns, used, cast_stats, by_itself, LARGEST[target], activation, second)
    return in_rows, in_columns, used


def _by_triton(
    x: Tensor,
    rowwise: Tensor,
    columnwise: Tensor,
    scale_inv: Tensor,
    cast_stats: Tensor | None,
    by_itself: bool,
    largest: float,
    activation: str,
    second: Tensor | None,
) -> None:
    kernels = _kernels()
    measured = None
    if by_itself:
        measured = kernels.largest_magnitude(x, activation=activation, second=second)
        if cast_stats is not None:
            noted = cast_stats.data[:1]  # as `.data`, see below; kernels' writes are not counted
            torch.maximum(noted, measured, out=noted)
    kernels.quantize_into(
        rowwise,
        columnwise,
        x,
        scale_inv=scale_inv,
        cast_stats=cast_stats,
        measured=measured,
        largest=largest,
        activation=activation,
        second=second,
    )


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("narrowcast.kernels.quantize")


def _plainly(
    x: Tensor,
    rowwise: Tensor,
    columnwise: Tensor,
    scale_inv: Tensor,
    cast_stats: Tensor | None,
    by_itself: bool,
    largest: float,
    activation: str,
    second: Tensor | None,
) -> None:
    """Do as the kernels do, in a pass for each operation."""
    # As `.data`, whose writes autograd does not count: it keeps these for the backward pass, where
    # they may be set for the first time; and other layers' counts lie in the same memory.
    scale_inv, cast_stats = scale_inv.data, None if cast_stats is None else cast_stats.data
    value = x.float()
    if activation == "gelu":
        value = F.gelu(value)
    elif activation == "gelu_backward":
        assert second is not None
        value = torch.ops.aten.gelu_backward(value, second.float())
    elif activation:
        assert second is not None
        value = GATES[activation](value) * second.float()
    amax = value.abs().amax()
    if by_itself:
        scale_inv.copy_(scale_inv_for(amax, largest))
    scaled = value / scale_inv
    if cast_stats is not None:
        torch.maximum(cast_stats[:1], amax.view(1).view(torch.int32), out=cast_stats[:1])
        saturated = (scaled.abs() > largest) & value.isfinite()
        flushed = (scaled.abs() <= _FLUSHED[largest]) & (value != 0)
        cast_stats[1] += value.numel()
        cast_stats[2:] += torch.stack((saturated.sum(), flushed.sum())).int()
    stored = castable(value, scale_inv, largest)
    count = x.shape[0]
    if rowwise.numel():
        rowwise[:count].copy_(stored)
        rowwise[count:].zero_()
    if columnwise.numel():
        columnwise[:, :count].copy_(stored.t())
        columnwise[:, count:].zero_()


# The scale that a first matrix sets and the magnitude it leaves are hidden from the compiler:
# declared, they would make it copy state back and forth for a maximum that may be taken twice.
# Registered by hand, at a fifth of what torch's decorator costs the host a call.
_library = torch.library.Library("narrowcast", "FRAGMENT")
_HOW = "Tensor? cast_stats, bool rowwise, bool columnwise, str activation, Tensor? second"
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_library.define(
    f"quantize_fp8(Tensor x, ScalarType target, {_HOW}) -> (Tensor, Tensor, Tensor)", tags=_TAGS
)
_library.define(
    f"quantize_fp8_by(Tensor x, ScalarType target, Tensor scale_inv, {_HOW}) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.impl("quantize_fp8", _quantize, "CompositeExplicitAutograd")
_library.impl("quantize_fp8_by", _quantize_by, "CompositeExplicitAutograd")


@torch.library.register_fake("narrowcast::quantize_fp8")
def _shapes(
    x: Tensor,
    target: torch.dtype,
    cast_stats: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    activation: str,
    second: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    fresh = x.new_empty(1, dtype=torch.float32)
    inputs = (cast_stats, rowwise, columnwise, activation, second)
    return *_shapes_by(x, target, fresh, *inputs), fresh


@torch.library.register_fake("narrowcast::quantize_fp8_by")
def _shapes_by(
    x: Tensor,
    target: torch.dtype,
    scale_inv: Tensor,
    cast_stats: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    activation: str,
    second: Tensor | None,
) -> tuple[Tensor, Tensor]:
    count, width = x.shape
    padded = count + -count % MULTIPLE
    return (
        x.new_empty((padded, width) if rowwise else 0, dtype=target),
        x.new_empty((width, padded) if columnwise else 0, dtype=target),
    )
