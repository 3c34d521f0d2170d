"""Long convolutions by the fast Fourier transform, with the gates around them.

A causal convolution of length L is usually padded to 2 L, transformed as real numbers, and half of
the result is thrown away. Here nothing is padded: with letter t turned by a^t, where a^M is the
imaginary unit, what would wrap around comes back in the imaginary part, and the real part is the
convolution (a "right-angle convolution": Crandall and Fagin 1994). Lags below zero wrap the other
way, so a two-sided filter costs no more than a causal one. One complex transform of M ≥ L numbers
takes the place of a real one of 2 L.

Transforms are computed in fp32, or fp64 for fp64, whatever the format of the sequences. Only what
came in is kept for the backward pass, in the format it came in; spectra are computed again, some
channels at a time, so that those of all channels are never alive together. Inside `torch.compile`
these are the operators `narrowcast::gated_convolution` and its backward pass.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.errors import RecipeError

NUMBERS_AT_ONCE = 2**23
"""Complex numbers of a spectrum that are alive together: 64 MiB, a few of which a pass needs."""


def fft_convolution(
    u: Tensor, filters: Tensor, *, causal: bool = True, chunk: int | None = None
) -> Tensor:
    """Convolve each channel of `u`, (rows, channels, length), with its filter; return the like.

    Causal filters are (channels, taps), tap k for the letter k before. Two-sided ones have an odd
    number of taps, with lag 0 in the middle and the first for the letter furthest ahead. `chunk` is
    how many channels are transformed together; else as many as memory is meant for.
    """
    return gated_convolution(u, filters, causal=causal, chunk=chunk)


def gated_convolution(
    value: Tensor,
    filters: Tensor,
    *,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
    causal: bool = True,
    chunk: int | None = None,
) -> Tensor:
    """Return after ⊙ (filters * z + bias ⊙ z) with z = before ⊙ value; what is None is left out.

    All but `filters` and `bias`, (channels,), are (rows, channels, length) and of one dtype, which
    is that of the result.
    """
    filters = _within(filters, value.shape[-1], causal=causal)
    result: Tensor = _apply(value, filters, bias, before, after, causal, chunk or 0)
    return result


def fast_length(length: int) -> int:
    """Return the least length from here on that is a power of two times 1, 3, 5, 7, 9 or 15."""
    odds = (1, 3, 5, 7, 9, 15)
    return min(odd << max((length - 1) // odd, 0).bit_length() for odd in odds)


def _within(filters: Tensor, length: int, *, causal: bool) -> Tensor:
    """Cut off lags that no pair of letters has."""
    taps = filters.shape[-1]
    if causal:
        return filters[..., :length]
    if taps % 2 == 0:
        raise RecipeError(
            f"a two-sided filter of {taps} taps has no middle; give it an odd number of taps"
        )
    middle = taps // 2
    reach = min(middle, length - 1)
    return filters[..., middle - reach : middle + reach + 1]


class _GatedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        filters: Tensor,
        bias: Tensor | None,
        before: Tensor | None,
        after: Tensor | None,
        causal: bool,
        chunk: int,
    ) -> Tensor:
        ctx.save_for_backward(value, filters, bias, before, after)
        ctx.causal, ctx.chunk = causal, chunk
        result: Tensor = torch.ops.narrowcast.gated_convolution(
            value, filters, bias, before, after, causal, chunk
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, filters, bias, before, after = ctx.saved_tensors
        grads = torch.ops.narrowcast.gated_convolution_backward(
            grad, value, filters, bias, before, after, ctx.causal, ctx.chunk
        )
        given = (value, filters, bias, before, after)
        wanted = (g if t is not None else None for g, t in zip(grads, given, strict=True))
        return *wanted, None, None


_apply: Any = _GatedConvolution.apply


def _forward(
    value: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    causal: bool,
    chunk: int,
) -> Tensor:
    result = torch.empty_like(value, memory_format=torch.contiguous_format)
    turns = _turns(value)
    for some in _chunks(value, chunk):
        z = _gated(value[:, some], before, some)
        spectrum = _spectrum(z, turns)
        spectrum *= _filter_spectrum(filters[some], turns, causal=causal)
        y = _back(spectrum, turns, value.shape[-1]).real
        if bias is not None:
            y = y + _column(bias[some]) * z
        result[:, some] = y if after is None else y * after[:, some]
    return result


def _backward(
    grad: Tensor,
    value: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    causal: bool,
    chunk: int,
) -> list[Tensor]:
    grads = _empty_grads(grad, value, filters, bias, before, after, causal, chunk)
    to_value, to_filters, to_bias, to_before, to_after = grads
    turns, length = _turns(value), value.shape[-1]
    for some in _chunks(value, chunk):
        z = _gated(value[:, some], before, some)
        of_filter = _filter_spectrum(filters[some], turns, causal=causal)
        of_z = _spectrum(z, turns)
        to_y = grad[:, some].to(z.dtype)
        if after is not None:
            y = _back(of_z * of_filter, turns, length).real
            y = y if bias is None else y + _column(bias[some]) * z
            to_after[:, some] = to_y * y
            to_y = to_y * after[:, some]
        of_grad = _spectrum(to_y, turns)
        summed = (of_grad * of_z.conj_physical_()).sum(0)
        to_filters[some] = _filter_part(summed, turns, filters.shape[-1], causal=causal)
        of_grad *= of_filter.conj_physical_()
        to_z = _back(of_grad, turns, length).real
        if bias is not None:
            to_bias[some] = (to_y * z).sum((0, 2))
            to_z = to_z + _column(bias[some]) * to_y
        if before is None:
            to_value[:, some] = to_z
        else:
            to_value[:, some] = to_z * before[:, some]
            to_before[:, some] = to_z * value[:, some]
    return grads


def _empty(
    value: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    causal: bool,
    chunk: int,
) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _empty_grads(
    grad: Tensor,
    value: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    causal: bool,
    chunk: int,
) -> list[Tensor]:
    """Take memory for five gradients; what was not given has an empty one."""
    return [
        value.new_empty(0 if t is None else t.shape, dtype=None if t is None else t.dtype)
        for t in (value, filters, bias, before, after)
    ]


def _chunks(value: Tensor, chunk: int) -> list[slice]:
    """Cut the channels so that a chunk's spectra fit the memory they are meant to take."""
    rows, channels, length = value.shape
    step = chunk or max(NUMBERS_AT_ONCE // max(rows * fast_length(length), 1), 1)
    return [slice(start, min(start + step, channels)) for start in range(0, channels, step)]


def _gated(value: Tensor, before: Tensor | None, some: slice) -> Tensor:
    wide = value.to(torch.float64 if value.dtype == torch.float64 else torch.float32)
    return wide if before is None else wide * before[:, some]


def _turns(value: Tensor) -> Tensor:
    """Return a^t for as many t as a transform has: quarter of a turn over all of them."""
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
    turned: Tensor = torch.fft.ifft(spectrum)[..., :length]
    return turned * turns[:length].conj_physical()


def _filter_spectrum(filters: Tensor, turns: Tensor, *, causal: bool) -> Tensor:
    """Return the spectra of filters, of which lags below zero are imaginary, at the far end."""
    filters = filters.to(turns.real.dtype)
    if causal:
        return _spectrum(filters, turns)
    middle = filters.shape[-1] // 2
    both = turns.new_zeros((len(filters), len(turns)))
    both.real[:, : middle + 1] = filters[:, middle:]
    if middle:
        both.imag[:, -middle:] = -filters[:, :middle]
    return _spectrum(both, turns)


def _filter_part(spectrum: Tensor, turns: Tensor, taps: int, *, causal: bool) -> Tensor:
    """Return the gradients of filters from their spectra."""
    both = _back(spectrum, turns, len(turns))
    if causal:
        return both.real[:, :taps]
    middle = taps // 2
    ahead = both.imag[:, len(turns) - middle :]
    return torch.cat([-ahead, both.real[:, : middle + 1]], dim=1)


def _column(bias: Tensor) -> Tensor:
    return bias[:, None]


_library = torch.library.Library("narrowcast", "FRAGMENT")
_GIVEN = "Tensor value, Tensor filters, Tensor? bias, Tensor? before, Tensor? after"
_library.define(
    f"gated_convolution({_GIVEN}, bool causal, int chunk) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"gated_convolution_backward(Tensor grad, {_GIVEN}, bool causal, int chunk) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("gated_convolution", _forward, "CompositeExplicitAutograd")
_library.impl("gated_convolution_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::gated_convolution", _empty)
torch.library.register_fake("narrowcast::gated_convolution_backward", _empty_grads)
