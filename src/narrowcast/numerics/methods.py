"""The rounding methods, each a few in-place passes over a source, a result and a scratch.

Adding and subtracting 1.5 * 2**k rounds exactly to nearest-even if the carrier's exponents reach
beyond the format's. Otherwise the bits are rounded, or cast there and back. `limit` is where to
saturate; None: overflow becomes inf, or NaN without one.

Large tensors are rounded in pieces that stay in the cache. Large results use large pages: Linux
takes as long to hand out 64 MiB of small ones as the rounding itself.
"""

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.numerics.formats import Format

# What numpy uses. Below, there are too few whole large pages to matter.
SMALLEST_BYTES = 4 * 2**20


def empty_on_large_pages(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Like `torch.empty_like`, on huge pages if they can help."""
    out = torch.empty_like(x, dtype=dtype)
    # A subclass may have no memory of its own, as torch's fake tensors.
    plain = type(out) is Tensor and out.device.type == "cpu"
    if sys.platform == "linux" and plain and out.nbytes >= SMALLEST_BYTES:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        # A hint: a system that does not follow it has lost nothing, so the answer is not looked at.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first),
            ctypes.c_size_t(out.data_ptr() + out.nbytes - first),
            mmap.MADV_HUGEPAGE,
        )
    return out


CHUNK = 262144
"""Elements of a piece, which fits the caches of two threads with its result and scratch."""

Apply = Callable[[Tensor, Tensor, Tensor], None]
"""Fills a result from a source, with a scratch to spoil; the three have one shape, none overlap."""


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """A dtype that rounding is computed in, with the integers its bits are read as."""

    float_dtype: torch.dtype
    int_dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int

    @property
    def exponent_mask(self) -> int:
        """Select the exponent field: it is the power of two at or below a normal number."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def mantissa_mask(self) -> int:
        return (1 << self.mantissa_bits) - 1

    @property
    def sign_mask(self) -> int:
        """Select the sign bit, which makes the smallest of the integers."""
        return -(1 << (self.exponent_bits + self.mantissa_bits))

    @property
    def largest_power(self) -> float:
        return float(2.0 ** (2 ** (self.exponent_bits - 1) - 1))

    def to_bits(self, value: float) -> int:
        """Return the bits of a positive number that is normal and exact in the carrier."""
        fraction, exponent = math.frexp(value)
        biased = exponent + (1 << (self.exponent_bits - 1)) - 2
        return (biased << self.mantissa_bits) + int((2 * fraction - 1) * 2.0**self.mantissa_bits)


SINGLE = Carrier(
    float_dtype=torch.float32, int_dtype=torch.int32, exponent_bits=8, mantissa_bits=23
)
DOUBLE = Carrier(
    float_dtype=torch.float64, int_dtype=torch.int64, exponent_bits=11, mantissa_bits=52
)

# Exponent and mantissa bits of the dtypes that may come in.
_WIDTHS = {
    torch.float64: (11, 52),
    torch.float32: (8, 23),
    torch.bfloat16: (8, 7),
    torch.float16: (5, 10),
}


def get_carrier(x: Tensor) -> Carrier:
    """Return what to compute in for `x`: its own precision, and never less than fp32."""
    if x.dtype not in _WIDTHS:
        raise UnsupportedError(
            f"Only floating-point tensors can be rounded to a format, got {x.dtype}. Convert it "
            "with .float() first."
        )
    return DOUBLE if x.dtype == torch.float64 else SINGLE


def represents_all(target: Format, dtype: torch.dtype) -> bool:
    """Return whether every value of `dtype` is already a value of `target`."""
    exponent_bits, mantissa_bits = _WIDTHS[dtype]
    return target.exponent_bits >= exponent_bits and target.mantissa_bits >= mantissa_bits


def largest_shared(target: Format, dtype: torch.dtype) -> float:
    """Return the largest value of both `target` and `dtype`. bf16 has no 65504, for example."""
    _, mantissa_bits = _WIDTHS[dtype]
    fraction, exponent = math.frexp(min(target.largest, torch.finfo(dtype).max))
    stored = 2.0 ** (1 + min(mantissa_bits, target.mantissa_bits))
    return math.ldexp(math.floor(fraction * stored) / stored, exponent)


def goes_in_pieces(x: Tensor) -> bool:
    """Return whether `x` is large, on a CPU, and outside a compiler that would fuse the passes."""
    return x.device.type == "cpu" and x.numel() > CHUNK and not torch.compiler.is_compiling()


def in_pieces(x: Tensor, apply: Apply, *, scratch: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return a tensor shaped as `x` in `dtype`, filled by `apply`, in pieces if that is faster.

    `apply` sees source and result in the carrier of `x`, and a scratch of the dtype `scratch`.
    """
    x = x.detach()
    if not goes_in_pieces(x):
        # The compiler takes no `out=` that is not contiguous; it chooses layouts itself anyway.
        compiling = torch.compiler.is_compiling()
        layout = torch.contiguous_format if compiling else torch.preserve_format
        out = torch.empty_like(x, dtype=dtype, memory_format=layout)
        _apply_to(x, out, torch.empty_like(out, dtype=scratch), apply)
        return out
    # A transposed tensor is contiguous in another order of its dimensions; gaps need a copy.
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    if not x.permute(order).is_contiguous():
        x, order = x.contiguous(), list(range(x.dim()))
    out = empty_on_large_pages(x, dtype=dtype)
    spare = torch.empty(CHUNK, dtype=scratch)
    sources = torch.split(x.permute(order).view(-1), CHUNK)
    results = torch.split(out.permute(order).view(-1), CHUNK)
    for source, result in zip(sources, results, strict=True):
        _apply_to(source, result, spare[: source.numel()], apply)
    return out


def in_row_pieces(
    rows: Tensor, scales: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return `apply(rows, scales)`, computed in chunks of rows if that is faster."""
    if not goes_in_pieces(rows):
        return apply(rows, scales)
    flat = rows.reshape(-1, rows.shape[-1])
    flat_scales = scales.expand(rows.shape).reshape(flat.shape)
    out = empty_on_large_pages(flat, dtype=flat.dtype)
    count = max(1, CHUNK // rows.shape[-1])
    parts = (torch.split(each, count) for each in (flat, flat_scales, out))
    for source, scale, result in zip(*parts, strict=True):
        result.copy_(apply(source, scale))
    return out.view(rows.shape)


def _apply_to(source: Tensor, result: Tensor, scratch: Tensor, apply: Apply) -> None:
    float_dtype = get_carrier(source).float_dtype
    wide = source.to(float_dtype)
    if result.dtype == float_dtype:
        apply(wide, result, scratch)
    else:
        wide_result = torch.empty_like(result, dtype=float_dtype)
        apply(wide, wide_result, scratch)
        result.copy_(wide_result)


def overflows(magnitude: Tensor, target: Format) -> Tensor:
    """Return for each finite magnitude whether rounding takes it beyond `target.largest`."""
    if target.overflow > torch.finfo(magnitude.dtype).max:
        return torch.zeros_like(magnitude, dtype=torch.bool)
    if target.overflow_is_even:
        return magnitude >= target.overflow
    return magnitude > target.overflow


def by_casting(target: Format, *, limit: float | None) -> Apply:
    """Round by a cast to the dtype of `target` and back; the scratch has that dtype."""
    # Without infinity the cast must not see an overflow: torch versions disagree about it.
    bound = target.largest if limit is None and not target.has_infinity else limit

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        if bound is None:
            scratch.copy_(source)
        else:
            scratch.copy_(torch.clamp(source, -bound, bound, out=result))
        result.copy_(scratch)
        if limit is None and not target.has_infinity:
            result.masked_fill_(overflows(source.abs(), target), math.nan)

    return apply


def by_adding(
    target: Format, carrier: Carrier, *, limit: float | None, scale: float | None = None
) -> Apply:
    """Round by adding 1.5 * 2**k and subtracting it; the scratch has the carrier's integers.

    With a power of two as `scale`, `source * scale` is rounded and divided again. It must fit, and
    a zero loses its sign.
    """
    lowest = carrier.to_bits(target.smallest_normal / (scale or 1.0))
    highest = carrier.to_bits(target.largest_power / (scale or 1.0))
    # In the sum, the last bit weighs what the last mantissa bit of `target` weighs at that power;
    # the 1.5 keeps it so for negative numbers.
    factor = 1.5 * 2.0 ** (carrier.mantissa_bits - target.mantissa_bits)

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.exponent_mask, out=scratch)
        power = scratch.clamp_(lowest, highest).view(carrier.float_dtype)
        torch.add(source, power, alpha=factor, out=result)
        result.sub_(power, alpha=factor)
        if scale is not None:
            return
        _fit_range(result, power, target, carrier, limit=limit)
        # A sum that cancels is +0, even where it was a negative number that vanished.
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.sign_mask, out=scratch)
        result.view(carrier.int_dtype).bitwise_or_(scratch)

    return apply


def by_steps(target: Format, carrier: Carrier, *, limit: float | None) -> Apply:
    """Round to a whole number of steps. A compiler may replace its division by an approximation."""
    lowest = carrier.to_bits(target.smallest_normal)
    highest = carrier.to_bits(target.largest_power)

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.exponent_mask, out=scratch)
        power = scratch.clamp_(lowest, highest).view(carrier.float_dtype)
        # What the products are added to; +0 would take the sign of a negative zero away.
        nothing = source.new_full((), -0.0)
        torch.addcdiv(nothing, source, power, value=1 / target.epsilon, out=result)
        torch.addcmul(nothing, result.round_(), power, value=target.epsilon, out=result)
        _fit_range(result, power, target, carrier, limit=limit)

    return apply


def by_bits(target: Format, carrier: Carrier, *, limit: float | None) -> Apply:
    """Round by integer arithmetic, for exponents as wide as the carrier's; scratch: its floats."""
    dropped = carrier.mantissa_bits - target.mantissa_bits

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        bits, rounded = source.view(carrier.int_dtype), result.view(carrier.int_dtype)
        # Just under half a step, and the last kept bit: so a tie carries only into odd numbers.
        torch.bitwise_right_shift(bits, dropped, out=rounded)
        rounded.bitwise_and_(1).add_(2 ** (dropped - 1) - 1).add_(bits)
        rounded.bitwise_and_(-(2**dropped))
        _keep_nan(source, result, scratch, limit=limit)

    return apply


def by_chance(
    target: Format, carrier: Carrier, *, limit: float | None, generator: Generator
) -> Apply:
    """Round down, then up by one step with the chance of the cut-off part."""
    lowest = carrier.to_bits(target.smallest_normal)
    highest = carrier.to_bits(target.largest_power)

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.exponent_mask, out=scratch)
        step = scratch.clamp_(lowest, highest).view(carrier.float_dtype).mul_(target.epsilon)
        # All exact: the step is a power of two, and a fraction has fewer bits than its number.
        steps = torch.abs(source, out=result).div_(step)
        whole = steps.floor()
        fraction = steps.sub_(whole)
        whole.add_(torch.empty_like(whole).uniform_(generator=generator) < fraction)
        torch.copysign(whole.mul_(step), source, out=result)
        _fit_range(result, step, target, carrier, limit=limit)

    return apply


def by_random_bits(
    target: Format, carrier: Carrier, *, limit: float | None, generator: Generator
) -> Apply:
    """Add random bits below the last kept one and cut there; scratch: the carrier's floats."""
    dropped = carrier.mantissa_bits - target.mantissa_bits

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        # One 64-bit draw serves four elements: drawing is what takes the time.
        draws = torch.empty(-(-result.numel() // 4), dtype=torch.int64, device=result.device)
        lanes = draws.random_(-(2**63), None, generator=generator).view(torch.int16)
        rounded = result.view(carrier.int_dtype)
        rounded.copy_(lanes[: result.numel()].view(result.shape)).bitwise_and_(2**dropped - 1)
        rounded.add_(source.view(carrier.int_dtype)).bitwise_and_(-(2**dropped))
        _keep_nan(source, result, scratch, limit=limit)

    return apply


def _fit_range(
    result: Tensor, scratch: Tensor, target: Format, carrier: Carrier, *, limit: float | None
) -> None:
    """Settle what lies beyond the largest value; `result` is on the grid continued upwards."""
    if limit is not None:
        result.clamp_(-limit, limit)
    elif target.has_infinity:
        # Lift the first power of two out of range to where the carrier overflows too, and return.
        lift = carrier.largest_power / target.largest_power
        result.mul_(lift).mul_(1 / lift)
    else:
        # Likewise, but only the carrier's infinity is wanted: times zero it is NaN.
        torch.mul(result, carrier.largest_power / target.overflow * 2, out=scratch)
        result.add_(scratch, alpha=0.0)


def _keep_nan(source: Tensor, result: Tensor, scratch: Tensor, *, limit: float | None) -> None:
    """Restore the NaN whose bits a carry has turned into something else, then saturate."""
    # A clamp to -inf leaves NaN alone, and nothing but NaN is above or beside -inf in a maximum.
    torch.maximum(result, torch.clamp(source, max=-math.inf, out=scratch), out=result)
    if limit is not None:
        result.clamp_(-limit, limit)
