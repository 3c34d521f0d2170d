"""The number formats, as IEEE 754 and the OCP 8-bit and microscaling specifications define them.

e4m3 and e2m1 use the codes of infinity for numbers, so their largest value is not where the bit
counts alone would put it.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from narrowcast.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Format:
    """A floating-point format, described well enough to round to it exactly."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    """Bits stored after the binary point; the leading one is not counted."""
    largest: float
    """The largest finite value."""
    has_infinity: bool
    """Whether overflow has an infinity to go to; without one it becomes NaN."""
    dtype: torch.dtype | None
    """The torch dtype that stores single values, or None if torch has none."""

    @property
    def bits(self) -> int:
        """Count the bits of one value, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self) -> float:
        """Bytes per stored value. tf32 is stored as fp32; two e2m1 values share a byte."""
        return self.bits / 8 if self.dtype is None else float(self.dtype.itemsize)

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """Smallest positive value, a subnormal."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def largest_power(self) -> float:
        """Largest power of two in the format."""
        return 2.0 ** (math.frexp(self.largest)[1] - 1)

    @property
    def overflow(self) -> float:
        """Midpoint above `largest`: values from here on round beyond the format."""
        return self.largest + self.largest_power * self.epsilon / 2

    @property
    def overflow_is_even(self) -> bool:
        """Return whether the midpoint itself overflows: a tie, so only where `largest` is odd."""
        return self.largest / (self.largest_power * self.epsilon) % 2 == 1

    @property
    def always_saturates(self) -> bool:
        """Return whether every code is a number, so that overflow has nowhere else to go."""
        return not self.has_infinity and self.largest == (2 - self.epsilon) * self.largest_power


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A format whose values share a scale, each `block` of them along the last dimension."""

    name: str
    element: Format
    block: int
    """Values that share one scale."""
    scale_format: Literal["e8m0", "e4m3"]
    """e8m0: a power of two. e4m3: a small float, with one fp32 scale more for the whole tensor."""

    @property
    def bits(self) -> float:
        """Bits per value, with its share of the 8-bit block scale."""
        return self.element.bits + 8 / self.block

    @property
    def bytes(self) -> float:
        """Bytes per stored value, with its share of the block scale."""
        return self.bits / 8


FP32 = Format(
    name="fp32",
    exponent_bits=8,
    mantissa_bits=23,
    largest=(2 - 2.0**-23) * 2.0**127,
    has_infinity=True,
    dtype=torch.float32,
)
TF32 = Format(
    name="tf32",
    exponent_bits=8,
    mantissa_bits=10,
    largest=(2 - 2.0**-10) * 2.0**127,
    has_infinity=True,
    dtype=torch.float32,
)
BF16 = Format(
    name="bf16",
    exponent_bits=8,
    mantissa_bits=7,
    largest=(2 - 2.0**-7) * 2.0**127,
    has_infinity=True,
    dtype=torch.bfloat16,
)
FP16 = Format(
    name="fp16",
    exponent_bits=5,
    mantissa_bits=10,
    largest=65504.0,
    has_infinity=True,
    dtype=torch.float16,
)
# OCP 8-bit floating point specification, revision 1.0: e4m3 keeps one NaN code and no infinity.
E4M3 = Format(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    largest=448.0,
    has_infinity=False,
    dtype=torch.float8_e4m3fn,
)
E5M2 = Format(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    largest=57344.0,
    has_infinity=True,
    dtype=torch.float8_e5m2,
)
# OCP microscaling specification, version 1.0: e2m1 has neither infinity nor NaN. torch's own
# float4_e2m1fn_x2 packs two values per element and has no arithmetic, so it is not used.
E2M1 = Format(
    name="e2m1",
    exponent_bits=2,
    mantissa_bits=1,
    largest=6.0,
    has_infinity=False,
    dtype=None,
)
MXFP8 = BlockFormat(name="mxfp8", element=E4M3, block=32, scale_format="e8m0")
NVFP4 = BlockFormat(name="nvfp4", element=E2M1, block=16, scale_format="e4m3")

FORMATS: Mapping[str, Format | BlockFormat] = MappingProxyType(
    {each.name: each for each in (FP32, TF32, BF16, FP16, E4M3, E5M2, E2M1, MXFP8, NVFP4)}
)
"""Every format by name."""


def format_named(name: str) -> Format | BlockFormat:
    """Return the format called `name`. Raises with a suggestion if there is none."""
    if name in FORMATS:
        return FORMATS[name]
    close = difflib.get_close_matches(name.lower(), FORMATS, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Write one of {', '.join(FORMATS)}."
    raise ConfigError(f"There is no format {name}. {hint}")


def plain_format(name: str) -> Format:
    """Return a format of single values by its name; not for block formats."""
    known = format_named(name)
    assert isinstance(known, Format), f"{name} is a block format"
    return known
