"""Convolutions by torch's FFT, with gates, turns and bias in the passes that copy anyhow."""

import torch
from torch import Tensor

from narrowcast.workloads.genomics.models.kernels.turning import (
    blocks_of,
    mix_spectra,
    turn_in,
    turn_out,
)
from narrowcast.workloads.genomics.models.transforms import (
    chunks,
    empty_grads,
    filter_part,
    filter_spectrum,
    turns_of,
)


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
    turns = turns_of(value)
    for some in chunks(value, chunk):
        v, b, a = (None if t is None else t[:, some] for t in (value, before, after))
        turned = turns.new_empty((*v.shape[:2], len(turns)))
        turn_in(v, b, turns, out=turned)
        spectrum = torch.fft.fft(turned)
        del turned
        spectrum *= filter_spectrum(filters[some], turns, causal=causal)
        turned = torch.fft.ifft(spectrum, norm="forward")
        del spectrum
        turn_out(
            turned,
            turns,
            value=v,
            before=b,
            bias=_some(bias, some),
            gates=(a, None),
            outs=(result[:, some], None),
        )
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
    """Return the gradients of all that was given to `forward`."""
    grads = empty_grads(value, filters, bias, before, after)
    to_value, to_filters, to_bias, to_before, to_after = grads
    turns, rows = turns_of(value), len(value)
    for some in chunks(value, chunk):
        g, v, b, a = (None if t is None else t[:, some] for t in (grad, value, before, after))
        of_filter = filter_spectrum(filters[some], turns, causal=causal)
        turned = turns.new_empty((2, *v.shape[:2], len(turns)))
        turn_in(v, b, turns, out=turned[0])
        turn_in(g, a, turns, out=turned[1])
        spectra = torch.fft.fft(turned)
        del turned
        summed = mix_spectra(*spectra, of_filter, forward=after is not None)
        to_filters[some] = filter_part(summed, turns, filters.shape[-1], causal=causal)
        turned = torch.fft.ifft(spectra if after is not None else spectra[1:], norm="forward")
        del spectra
        own = _some(bias, some)
        if after is not None:
            # after's gradient is gated by the gradient where the result is gated by after
            out = (to_after[:, some], None)
            turn_out(turned[0], turns, value=v, before=b, bias=own, gates=(g, None), outs=out)
        sums = None
        if own is not None:
            sums = turns.real.new_empty((rows, v.shape[1], blocks_of(v.shape[2])))
        turn_out(
            turned[-1],
            turns,
            value=g,
            before=a,
            bias=own,
            gates=(b, v),
            outs=(to_value[:, some], None if before is None else to_before[:, some]),
            products=sums,
        )
        if sums is not None:
            to_bias[some] = sums.sum((0, 2))
    return grads


def _some(bias: Tensor | None, some: slice) -> Tensor | None:
    return None if bias is None else bias[some]
