"""Scale, cast to fp8 and transpose a matrix in one read of it.

A product on fp8 tensor cores wants both operands contiguous along the dimension that is summed, so
an activation is needed as it is for one product and transposed for the next. One pass reads 2 bytes
an element and writes 1 for each layout; on the way it notes the largest magnitude, which is what
the next step's scale comes from, and how many values the cast lost. Without a scale from the past,
a pass before it takes that of the matrix itself. Rows are filled up with zeros to a multiple of 16,
which adds nothing to a product.

Inside `torch.compile` this is one opaque operator, `narrowcast::quantize_fp8`: no graph break, and
the same kernel as in eager mode. Where Triton has no kernels, plain torch does the same in more
passes.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.kernels.launch import unsupported_reason

MULTIPLE = 16
"""cuBLAS asks it of every dimension of an fp8 product, the summed one included."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# Half of the smallest value, which rounds to zero.
_FLUSHED = {448.0: 2.0**-10, 57344.0: 2.0**-17}

# Addresses of the scales that have been set. Known to the host, so that no step asks the device,
# and by address, because only tensors go through a compiled graph.
_calibrated: set[int] = set()


class Quantized(NamedTuple):
    """A matrix in fp8: as it is, transposed, and what to multiply either with to have it back."""

    rows: Tensor
    """(rows, columns); empty if it was not asked for."""
    columns: Tensor
    """(columns, rows); empty if it was not asked for."""
    inverse: Tensor
    """One fp32 power of two."""


class LocallyQuantized(NamedTuple):
    """A matrix in fp8 as it is and transposed, with scales of its lines or blocks for either."""

    rows: Tensor
    columns: Tensor
    rows_inverse: Tensor
    columns_inverse: Tensor


def quantize(
    x: Tensor,
    target: torch.dtype,
    *,
    inverse: Tensor | None = None,
    notes: Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    activation: str = "",
    beside: Tensor | None = None,
) -> Quantized:
    """Return a matrix in fp8, in one or both layouts.

    Without `inverse` the scale is the largest power of two that keeps every value. With it, one
    number on the device, that scale is used and larger values saturate; the first time the matrix
    itself decides it. `notes` are four int32, of which the first becomes the largest magnitude as
    bits if it is larger than what is there; to the others are added how many values were looked at
    (by a kernel, about one in eight), how many of these were beyond the format's range, and how
    many became zero that were not. What is not finite becomes NaN. With an activation the matrix is
    quantised after it: `gelu` of x, or `gelu_backward`, x times the derivative at `beside`.
    """
    call = torch.ops.narrowcast.quantize_fp8 if torch.compiler.is_compiling() else _quantize
    found = call(x, target, inverse, notes, rows, columns, activation, beside)
    return Quantized(found[0], found[1], found[2] if inverse is None else inverse)


def quantize_into(into: Quantized, x: Tensor, *, notes: Tensor | None, by_itself: bool) -> None:
    """Quantise into a result that exists; `by_itself`: with a new scale, of this matrix.

    A scale that no matrix has set yet, or that was taken back, is of this matrix too.
    """
    if not by_itself:
        by_itself = into.inverse.data_ptr() not in _calibrated
        trust(into.inverse)
    work = _by_triton if not unsupported_reason(x.device) else _plainly
    largest = LARGEST[into.rows.dtype]
    # As `.data`: other layers' notes lie in the same memory, and autograd may be keeping those.
    scale, noted = into.inverse.data, None if notes is None else notes.data
    work(x.contiguous(), into.rows, into.columns, scale, noted, by_itself, largest, "", None)


def inverse_for(amax: Tensor, largest: Tensor | float) -> Tensor:
    """Return the inverses of the largest powers of two that keep `amax` within `largest`.

    One where nothing is known: nothing but zeros was seen, or something that is not finite.
    """
    mantissa, exponent = torch.frexp(amax)
    # Both formats end at 1.75 · 2ⁿ. As exponents, where a division would round.
    top = torch.frexp(torch.as_tensor(largest, device=amax.device)).exponent
    power = (top - exponent - (mantissa > 0.875).int()).clamp(-126, 126)
    return torch.where((amax > 0) & amax.isfinite(), torch.ldexp(torch.ones_like(amax), -power), 1)


def castable(value: Tensor, inverse: Tensor, largest: float) -> Tensor:
    """Return values scaled and saturated; what is not finite becomes NaN."""
    return (value / inverse).clamp(-largest, largest) + value * 0


def trust(inverse: Tensor) -> None:
    """Let a scale be used as it is, though no matrix has set it here."""
    _calibrated.add(inverse.data_ptr())


def is_trusted(inverse: Tensor) -> bool:
    """Say whether a scale is used as it is, or the next matrix decides it."""
    return inverse.data_ptr() in _calibrated


def trusted_among(addresses: AbstractSet[int]) -> frozenset[int]:
    """Return the addresses of those scales that are used as they are."""
    return frozenset(_calibrated & addresses)


def distrust(addresses: set[int]) -> None:
    """Forget scales whose memory goes back."""
    _calibrated.difference_update(addresses)


def _quantize(
    x: Tensor,
    target: torch.dtype,
    inverse: Tensor | None,
    notes: Tensor | None,
    rows: bool,
    columns: bool,
    activation: str,
    beside: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    beside = None if beside is None else beside.contiguous()
    count, width = x.shape
    padded = count + -count % MULTIPLE
    in_rows = torch.empty((padded, width) if rows else 0, dtype=target, device=x.device)
    in_columns = torch.empty((width, padded) if columns else 0, dtype=target, device=x.device)
    fresh = torch.empty(1 if inverse is None else 0, dtype=torch.float32, device=x.device)
    if not x.numel():
        return in_rows, in_columns, fresh.fill_(1)
    by_itself = inverse is None or inverse.data_ptr() not in _calibrated
    given = fresh if inverse is None else inverse
    if inverse is not None:
        _calibrated.add(inverse.data_ptr())
    work = _by_triton if not unsupported_reason(x.device) else _plainly
    # As `.data`, whose writes autograd does not count: it keeps these for the backward pass, where
    # they may be set for the first time.
    given, noted = given.data, None if notes is None else notes.data
    work(x, in_rows, in_columns, given, noted, by_itself, LARGEST[target], activation, beside)
    return in_rows, in_columns, fresh


def _by_triton(
    x: Tensor,
    rows: Tensor,
    columns: Tensor,
    inverse: Tensor,
    notes: Tensor | None,
    by_itself: bool,
    largest: float,
    activation: str,
    beside: Tensor | None,
) -> None:
    from narrowcast.kernels.quantize import largest_magnitude, quantize_into

    measured = None
    if by_itself:
        measured = largest_magnitude(x, activation=activation, beside=beside)
        if notes is not None:
            torch.maximum(notes[:1], measured, out=notes[:1])
    quantize_into(
        rows,
        columns,
        x,
        inverse=inverse,
        notes=notes,
        measured=measured,
        largest=largest,
        activation=activation,
        beside=beside,
    )


def _plainly(
    x: Tensor,
    rows: Tensor,
    columns: Tensor,
    inverse: Tensor,
    notes: Tensor | None,
    by_itself: bool,
    largest: float,
    activation: str,
    beside: Tensor | None,
) -> None:
    """Do as the kernels do, in a pass for each operation."""
    value = x.float()
    if activation == "gelu":
        value = F.gelu(value)
    elif activation == "gelu_backward":
        assert beside is not None
        value = torch.ops.aten.gelu_backward(value, beside.float())
    amax = value.abs().amax()
    if by_itself:
        inverse.copy_(inverse_for(amax, largest))
    scaled = value / inverse
    if notes is not None:
        torch.maximum(notes[:1], amax.view(1).view(torch.int32), out=notes[:1])
        saturated = (scaled.abs() > largest) & value.isfinite()
        flushed = (scaled.abs() <= _FLUSHED[largest]) & (value != 0)
        notes[1] += value.numel()
        notes[2:] += torch.stack((saturated.sum(), flushed.sum())).int()
    kept = castable(value, inverse, largest)
    count = x.shape[0]
    if rows.numel():
        rows[:count].copy_(kept)
        rows[count:].zero_()
    if columns.numel():
        columns[:, :count].copy_(kept.t())
        columns[:, count:].zero_()


# The scale that a first matrix sets and the magnitude it leaves are hidden from the compiler:
# declared, they would make it copy state back and forth for a maximum that may be taken twice.
# Registered by hand, at a fifth of what torch's decorator costs the host a call.
_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "quantize_fp8(Tensor x, ScalarType target, Tensor? inverse, Tensor? notes, bool rows, "
    "bool columns, str activation, Tensor? beside) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)
_library.impl("quantize_fp8", _quantize, "CompositeExplicitAutograd")


@torch.library.register_fake("narrowcast::quantize_fp8")
def _shapes(
    x: Tensor,
    target: torch.dtype,
    inverse: Tensor | None,
    notes: Tensor | None,
    rows: bool,
    columns: bool,
    activation: str,
    beside: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    count, width = x.shape
    padded = count + -count % MULTIPLE
    return (
        x.new_empty((padded, width) if rows else 0, dtype=target),
        x.new_empty((width, padded) if columns else 0, dtype=target),
        x.new_empty(1 if inverse is None else 0, dtype=torch.float32),
    )
