"""How far apart two tensors are: in steps of a format, and in decibels."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.numerics.formats import Format
from narrowcast.numerics.methods import CHUNK, DOUBLE, get_carrier, goes_in_pieces, overflows
from narrowcast.numerics.rounding import round_to


def ulp_distance(a: Tensor, b: Tensor, target: Format) -> Tensor:
    """Count, element by element, the steps between the values of `target` nearest to `a` and `b`.

    What overflows is one step beyond the largest value. NaN is at no distance from NaN, and at the
    largest int64 from everything else.
    """
    first, second = a.detach().double(), b.detach().double()
    distance = (_rank(first, target) - _rank(second, target)).abs()
    distance.masked_fill_(first.isnan() != second.isnan(), torch.iinfo(torch.int64).max)
    return distance.masked_fill_(first.isnan() & second.isnan(), 0)


def snr_db(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal-to-noise ratio in decibels, summed in fp64; waits for the device.

    Infinite where the two are equal, NaN where either is not finite.
    """
    exact = reference.detach().double()
    signal = float(exact.square().sum())
    noise = float((exact - approximation.detach().double()).square().sum())
    if not math.isfinite(signal) or not math.isfinite(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _rank(x: Tensor, target: Format) -> Tensor:
    """Return the index of each value of `x` among the values of `target`."""
    rounded = round_to(x, target, saturate=True).nan_to_num()
    power = rounded.view(DOUBLE.int_dtype).bitwise_and(DOUBLE.exponent_mask).view(x.dtype)
    power = power.clamp(min=target.smallest_normal)
    steps = rounded.abs() / (power * target.epsilon)
    # Each binade above the smallest normal number has as many values as lie below that.
    binades = torch.frexp(power).exponent - math.frexp(target.smallest_normal)[1]
    rank = steps.long() + (binades.long() << target.mantissa_bits)
    rank += overflows(x.abs(), target)
    return torch.where(rounded < 0, -rank, rank)


@dataclass(frozen=True, kw_only=True)
class CastLoss:
    """Counts of the elements of a tensor that a format cannot represent."""

    elements: int
    """All elements, the lost ones included."""
    nonfinite: int
    """Elements that were already inf or NaN."""
    overflowed: int
    """Finite elements that round beyond the largest value."""
    flushed: int
    """Nonzero elements that round to zero."""

    @property
    def overflow_rate(self) -> float:
        """Fraction of elements that overflowed; zero if there are none."""
        return self.overflowed / max(self.elements, 1)

    @property
    def flush_rate(self) -> float:
        """Fraction of elements that were flushed to zero; zero if there are none."""
        return self.flushed / max(self.elements, 1)


def cast_loss(x: Tensor, target: Format) -> CastLoss:
    """Count the elements of `x` that `target` cannot represent. Synchronises with the device."""
    elements, nonfinite, overflowed, flushed = cast_counts(x, target).tolist()
    return CastLoss(elements=elements, nonfinite=nonfinite, overflowed=overflowed, flushed=flushed)


def cast_counts(x: Tensor, target: Format) -> Tensor:
    """Return the four counts of `CastLoss`, in its order, as int64 on the device of `x`.

    Does not synchronise with the device, so counts of many tensors can be summed first.
    """
    x = x.detach()
    if not goes_in_pieces(x):
        return _counts(x, target)
    pieces = torch.split(x.flatten(), CHUNK)
    return torch.stack([_counts(each, target) for each in pieces]).sum(0)


def _counts(x: Tensor, target: Format) -> Tensor:
    magnitude = x.to(get_carrier(x).float_dtype).abs()
    # NaN is neither below nor above anything, so each count is of what lies below a bound.
    finite = _count(torch.le, magnitude, torch.finfo(magnitude.dtype).max)
    carried = finite
    if target.overflow <= torch.finfo(magnitude.dtype).max:
        # Ties round to even: where the largest value is odd, the midpoint above it overflows.
        below = torch.lt if target.overflow_is_even else torch.le
        carried = _count(below, magnitude, target.overflow)
    # Likewise half the smallest value, a tie, rounds to zero.
    to_zero = _count(torch.le, magnitude, target.smallest / 2)
    zeros = _count(torch.le, magnitude, 0.0)
    elements = torch.full_like(finite, x.numel())
    return torch.stack([elements, elements - finite, finite - carried, to_zero - zeros])


def _count(compare: Callable[..., Tensor], magnitude: Tensor, bound: float) -> Tensor:
    if magnitude.device.type != "cpu" or torch.compiler.is_compiling():
        return compare(magnitude, bound).sum()
    # Written as floats a comparison is vectorised, as bools it is not: five times as fast. The sum
    # is exact, as a piece has fewer than 2**24 elements.
    return compare(magnitude, bound, out=torch.empty_like(magnitude)).sum().long()
