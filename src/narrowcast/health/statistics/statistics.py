"""What samples of many tensors lose to a format. Nothing here synchronises with the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.numerics import FP32, BlockFormat, Format, format_named, round_to, scale_for

COLUMNS = ("amax", "amin", "overflow", "underflow", "subnormal", "nonfinite", "snr_db")
"""Of a result, in this order. An SNR of NaN: nothing was changed, or nothing was there."""

LOWEST, POWERS = -149, 277
"""The powers of two that fp32 has, from its smallest subnormal number on."""

RUN = 128
"""Neighbours that a sample keeps together, as blocks share a scale."""


def statistics(samples: Tensor, target: Format, *, scaling: str = "none") -> Tensor:
    """Return what each row of `samples` loses to `target`: (tensors, columns), in fp32.

    Scales are powers of two, of a sample or for `block` of each run of 128. A layer with row scales
    may lose less.
    """
    inputs = samples.float()
    finite = inputs.isfinite()
    x = torch.nan_to_num(inputs, 0.0, 0.0, 0.0)
    magnitude = x.abs()
    scale = None if scaling == "none" else _scales(x, target, scaling)
    scaled = magnitude if scale is None else magnitude * scale
    # Counts of nested sets, whose differences are wanted: cheaper than to mark each difference.
    zeros, little = _count(magnitude == 0), _count(scaled < target.smallest_normal)
    whole, length = _count(finite), x.shape[1]
    if target is FP32:  # what is finite in it loses nothing to it
        beyond, gone = torch.zeros_like(zeros), zeros
    else:
        over = torch.ge if target.overflow_is_even else torch.gt
        beyond, gone = _count(over(scaled, _end(target))), _count(scaled <= target.smallest / 2)
    shares = (beyond, gone - zeros, little - gone, length - whole)
    columns = (
        torch.where(whole == length, magnitude.amax(1), math.inf),
        _smallest_above_zero(magnitude),
        *(share / length for share in shares),
        _snr(x, target, scale),
    )
    return torch.stack(columns, dim=1)


def _snr(x: Tensor, target: Format, scale: Tensor | None) -> Tensor:
    """Return the signal-to-noise ratio of each row's cast in dB; NaN where nothing is lost."""
    if target is FP32:
        return torch.full_like(x[:, 0], math.nan)
    if scale is None:
        error = x - round_to(x, target, saturate=True)
    else:
        error = x - round_to(x * scale, target, saturate=True) / scale
    signal, noise = (torch.linalg.vector_norm(each, dim=1) for each in (x, error))
    snr = 20 * torch.log10(signal / noise)
    return torch.where(snr.isfinite(), snr, math.nan)


def what_if(samples: Tensor, name: str) -> Tensor:
    """Return what each row would lose to the format of this name, as a layer would scale it."""
    target = format_named(name)
    if isinstance(target, BlockFormat):
        return statistics(samples, target.element, scaling="block")
    return statistics(samples, target, scaling="tensor" if target.bits <= 8 else "none")


def exponent_counts(samples: Tensor, target: Format, *, scaling: str = "none") -> Tensor:
    """Count the values of each row at each power of two from 2**LOWEST: (tensors, powers)."""
    x = samples.float()
    finite = torch.where(x.isfinite(), x, 0.0)
    scaled = finite.abs() * _scales(finite, target, scaling)
    powers = torch.frexp(scaled).exponent.long() - 1 - LOWEST
    counts = torch.zeros(len(x), POWERS, device=x.device, dtype=torch.int64)
    return counts.scatter_add_(1, powers.clamp(0, POWERS - 1), (scaled > 0).long())


def trimmed(counts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the lowest power that any value has, and the counts from there to the highest."""
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return 0, ()
    return LOWEST + filled[0], tuple(counts[filled[0] : filled[-1] + 1])


def _scales(x: Tensor, target: Format, scaling: str) -> Tensor:
    if scaling == "none":
        return torch.ones_like(x[:, :1])
    if scaling == "block" and x.shape[1] % RUN == 0:
        runs = x.view(-1, RUN)
        return scale_for(runs, target, per="row").expand_as(runs).reshape(x.shape)
    return scale_for(x, target, per="row")


def _end(target: Format) -> float:
    """Return where a format ends; torch refuses to compare fp32 with what is beyond it."""
    return target.overflow if target.overflow <= torch.finfo(torch.float32).max else math.inf


def _count(which: Tensor) -> Tensor:
    return which.sum(1, dtype=torch.int32)


def _smallest_above_zero(magnitude: Tensor) -> Tensor:
    """Return the smallest number above zero of each row, by its bits; zero if there is none."""
    # As integers, magnitudes have the same order. One less, zero becomes the largest.
    below = (magnitude.view(torch.int32) - 1).bitwise_and_(0x7FFFFFFF).amin(1)
    result = (below.clamp(max=0x7FFFFFFE) + 1).view(torch.float32)
    return torch.where(below == 0x7FFFFFFF, 0.0, result)
