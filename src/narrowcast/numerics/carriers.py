"""The dtypes that rounding is computed in, and how a large tensor goes through them in pieces.

A rounding method is a few elementwise passes. Over a whole large tensor each of them would stream
it through memory once more; over pieces that stay in the cache, all of them cost little more than
the one read and the one write that any conversion needs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.numerics import pages
from narrowcast.numerics.formats import Format

CHUNK = 262144
"""Elements of a piece: a megabyte of fp32, so that what each of two threads has of a piece, its
result and its scratch fits a second-level cache. Half as many pay for calls, more for memory."""

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
        """Select the bits after the binary point."""
        return (1 << self.mantissa_bits) - 1

    @property
    def sign_mask(self) -> int:
        """Select the sign bit, which makes the smallest of the integers."""
        return -(1 << (self.exponent_bits + self.mantissa_bits))

    @property
    def largest_power(self) -> float:
        """Give the largest power of two the carrier holds."""
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
    """Say whether every value of `dtype` is already a value of `target`."""
    exponent_bits, mantissa_bits = _WIDTHS[dtype]
    return target.exponent_bits >= exponent_bits and target.mantissa_bits >= mantissa_bits


def largest_shared(target: Format, dtype: torch.dtype) -> float:
    """Return the largest value that both `target` and `dtype` have.

    Less than `target.largest` where `dtype` cannot hold that: in bf16, 65504 would become 65536.
    """
    _, mantissa_bits = _WIDTHS[dtype]
    fraction, exponent = math.frexp(min(target.largest, torch.finfo(dtype).max))
    stored = 2.0 ** (1 + min(mantissa_bits, target.mantissa_bits))
    return math.ldexp(math.floor(fraction * stored) / stored, exponent)


def goes_in_pieces(x: Tensor) -> bool:
    """Say whether `x` is large and on a CPU, and no compiler is there to fuse passes into one."""
    return x.device.type == "cpu" and x.numel() > CHUNK and not torch.compiler.is_compiling()


def in_pieces(x: Tensor, apply: Apply, *, scratch: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return a tensor shaped as `x` in `dtype`, filled by `apply`, in pieces where that is faster.

    `apply` sees source and result in the carrier of `x`, whatever `x.dtype` and `dtype` are, and a
    scratch of the dtype asked for.
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
    out = pages.empty_like(x, dtype=dtype)
    spare = torch.empty(CHUNK, dtype=scratch)
    sources = torch.split(x.permute(order).view(-1), CHUNK)
    results = torch.split(out.permute(order).view(-1), CHUNK)
    for source, result in zip(sources, results, strict=True):
        _apply_to(source, result, spare[: source.numel()], apply)
    return out


def in_row_pieces(
    rows: Tensor, scales: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return `apply(rows, scales)`, which treats rows alike, in pieces where that is faster."""
    if not goes_in_pieces(rows):
        return apply(rows, scales)
    flat = rows.reshape(-1, rows.shape[-1])
    flat_scales = scales.expand(rows.shape).reshape(flat.shape)
    out = pages.empty_like(flat, dtype=flat.dtype)
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
