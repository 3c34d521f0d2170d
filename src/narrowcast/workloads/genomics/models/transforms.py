"""FFT convolutions in plain torch, a chunk at a time."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

NUMBERS_AT_ONCE = 2**22
"""Complex numbers per chunk, 32 MiB, which stays in the cache of a large GPU."""


def forward(
    value: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    causal: bool,
    chunk: int,
) -> Tensor:
    """Return after ⊙ (filters * z + bias ⊙ z) with z = before ⊙ value."""
    result = torch.empty_like(value, memory_format=torch.contiguous_format)
    turns = quarter_turns(value)
    for channels, parts in pieces(value, chunk):
        of_filter = filter_spectrum(filters[channels], turns, causal=causal)
        for rows in parts:
            here = (rows, channels)
            z = _gated(value, before, here)
            spectrum = _spectrum(z, turns)
            spectrum *= of_filter
            y = _back(spectrum, turns, value.shape[-1]).real
            if bias is not None:
                y = y + bias[channels, None] * z
            result[here] = y if after is None else y * after[here]
    return result


def backward(
    grad: Tensor,
    value: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    causal: bool,
    chunk: int,
) -> list[Tensor]:
    """Return the gradients of all inputs of `forward`."""
    grads = empty_grads(value, filters, bias, before, after)
    to_value, to_filters, to_bias, to_before, to_after = grads
    turns, length = quarter_turns(value), value.shape[-1]
    for channels, parts in pieces(value, chunk):
        of_filter = filter_spectrum(filters[channels], turns, causal=causal)
        summed, to_bias_here = torch.zeros_like(of_filter), turns.real.new_zeros(len(of_filter))
        for rows in parts:
            here = (rows, channels)
            z = _gated(value, before, here)
            of_z = _spectrum(z, turns)
            to_y = grad[here].to(z.dtype)
            if after is not None:
                y = _back(of_z * of_filter, turns, length).real
                y = y if bias is None else y + bias[channels, None] * z
                to_after[here] = to_y * y
                to_y = to_y * after[here]
            of_grad = _spectrum(to_y, turns)
            summed += (of_grad * of_z.conj_physical_()).sum(0)
            of_grad *= of_filter.conj_physical()
            to_z = _back(of_grad, turns, length).real
            if bias is not None:
                to_bias_here += (to_y * z).sum((0, 2))
                to_z = to_z + bias[channels, None] * to_y
            to_value[here] = to_z if before is None else to_z * before[here]
            if before is not None:
                to_before[here] = to_z * value[here]
        to_filters[channels] = filter_part(summed, turns, filters.shape[-1], causal=causal)
        if bias is not None:
            to_bias[channels] = to_bias_here
    return grads


def empty_grads(*inputs: Tensor | None) -> list[Tensor]:
    """Return empty gradients; of size 0 for None."""
    nothing = torch.empty(0, device=next(t.device for t in inputs if t is not None))
    return [
        nothing.clone() if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in inputs
    ]


def fast_length(length: int) -> int:
    """Return the smallest size >= `length` that is a power of two times 1, 3, 5, 7, 9 or 15."""
    odds = (1, 3, 5, 7, 9, 15)
    return min(odd << max((length - 1) // odd, 0).bit_length() for odd in odds)


def pieces(value: Tensor, chunk: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield slices of channels, with the slices of rows to transform together."""
    rows, channels, length = value.shape
    size = fast_length(length)
    step = chunk or max(NUMBERS_AT_ONCE // size, 1)
    together = max(NUMBERS_AT_ONCE // (min(step, channels) * size), 1)
    parts = [slice(start, min(start + together, rows)) for start in range(0, rows, together)]
    for start in range(0, channels, step):
        yield slice(start, min(start + step, channels)), parts


def _gated(value: Tensor, before: Tensor | None, here: tuple[slice, slice]) -> Tensor:
    wide = value[here].to(torch.float64 if value.dtype == torch.float64 else torch.float32)
    return wide if before is None else wide * before[here]


def quarter_turns(value: Tensor) -> Tensor:
    """Return a^t for t below the transform size, a quarter turn in all."""
    size = fast_length(value.shape[-1])
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    angles = torch.arange(size, device=value.device, dtype=dtype) * (math.pi / 2 / size)
    return torch.polar(torch.ones_like(angles), angles)


def _spectrum(x: Tensor, turns: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fft(x * turns[: x.shape[-1]], n=len(turns))
    return spectrum


def _back(spectrum: Tensor, turns: Tensor, length: int) -> Tensor:
    # Conjugated in memory: compiled graphs call operators where torch does not heed the mark that
    # `conj()` leaves on a view (2.13).
    turned: Tensor = torch.fft.ifft(spectrum, norm="forward")[..., :length]
    return turned * turns[:length].conj_physical()


def filter_spectrum(filters: Tensor, turns: Tensor, *, causal: bool) -> Tensor:
    """Return filter spectra over the transform size; negative lags are imaginary, at the end."""
    filters = filters.to(turns.real.dtype) / len(turns)
    if causal:
        return _spectrum(filters, turns)
    middle = filters.shape[-1] // 2
    both = turns.new_zeros((len(filters), len(turns)))
    both.real[:, : middle + 1] = filters[:, middle:]
    if middle:
        both.imag[:, -middle:] = -filters[:, :middle]
    return _spectrum(both, turns)


def filter_part(spectrum: Tensor, turns: Tensor, taps: int, *, causal: bool) -> Tensor:
    """Return filter gradients from their spectra."""
    both = _back(spectrum / len(turns), turns, len(turns))
    if causal:
        return both.real[:, :taps]
    middle = taps // 2
    ahead = both.imag[:, len(turns) - middle :]
    return torch.cat([-ahead, both.real[:, : middle + 1]], dim=1)
