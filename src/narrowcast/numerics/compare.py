"""How far apart two tensors are: in steps of a format, and in decibels."""

import math

import torch
from torch import Tensor

from narrowcast.numerics.carriers import DOUBLE
from narrowcast.numerics.formats import Format
from narrowcast.numerics.methods import overflows
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
    """Return where each value of `x` stands among those of `target`, counted from zero."""
    rounded = round_to(x, target, saturate=True).nan_to_num()
    power = rounded.view(DOUBLE.int_dtype).bitwise_and(DOUBLE.exponent_mask).view(x.dtype)
    power = power.clamp(min=target.smallest_normal)
    steps = rounded.abs() / (power * target.epsilon)
    # Each binade above the smallest normal number has as many values as lie below that.
    binades = torch.frexp(power).exponent - math.frexp(target.smallest_normal)[1]
    rank = steps.long() + (binades.long() << target.mantissa_bits)
    rank += overflows(x.abs(), target)
    return torch.where(rounded < 0, -rank, rank)
