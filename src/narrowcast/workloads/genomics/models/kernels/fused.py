"""FFT convolutions with gates and bias fused into the copies around the FFT."""

import torch
from torch import Tensor

from narrowcast.workloads.genomics.models.kernels.turning import (
    block_count,
    mix_spectra,
    turn_in,
    turn_out,
)
from narrowcast.workloads.genomics.models.transforms import (
    empty_grads,
    filter_part,
    filter_spectrum,
    pieces,
    quarter_turns,
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
    turns = quarter_turns(value)
    for channels, parts in pieces(value, chunk):
        of_filter = filter_spectrum(filters[channels], turns, causal=causal)
        for rows in parts:
            here = (rows, channels)
            v, b, a = value[here], _part(before, here), _part(after, here)
            turned = turns.new_empty((*v.shape[:2], len(turns)))
            turn_in(v, b, turns, out=turned)
            spectrum = torch.fft.fft(turned)
            del turned
            spectrum *= of_filter
            turned = torch.fft.ifft(spectrum, norm="forward")
            del spectrum
            own = None if bias is None else bias[channels]
            out = (result[here], None)
            turn_out(turned, turns, value=v, before=b, bias=own, gates=(a, None), outs=out)
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
    turns, blocks = quarter_turns(value), block_count(value.shape[2])
    products = None if bias is None else turns.real.new_empty((*value.shape[:2], blocks))
    for channels, parts in pieces(value, chunk):
        of_filter = filter_spectrum(filters[channels], turns, causal=causal)
        summed = torch.zeros_like(of_filter)
        own = None if bias is None else bias[channels]
        for rows in parts:
            here = (rows, channels)
            g, v, b, a = grad[here], value[here], _part(before, here), _part(after, here)
            turned = turns.new_empty((2, *v.shape[:2], len(turns)))
            turn_in(v, b, turns, out=turned[0])
            turn_in(g, a, turns, out=turned[1])
            spectra = torch.fft.fft(turned)
            del turned
            mix_spectra(spectra[0], spectra[1], of_filter, summed, forward=after is not None)
            turned = torch.fft.ifft(spectra if after is not None else spectra[1:], norm="forward")
            del spectra
            if after is not None:
                # Its gradient is gated by the result's gradient as the result is by it.
                out = (to_after[here], None)
                turn_out(turned[0], turns, value=v, before=b, bias=own, gates=(g, None), outs=out)
            turn_out(
                turned[-1],
                turns,
                value=g,
                before=a,
                bias=own,
                gates=(b, v),
                outs=(to_value[here], None if before is None else to_before[here]),
                products=None if products is None else products[here],
            )
        to_filters[channels] = filter_part(summed, turns, filters.shape[-1], causal=causal)
    if products is not None:
        to_bias.copy_(products.sum((0, 2)))
    return grads


def _part(x: Tensor | None, here: tuple[slice, slice]) -> Tensor | None:
    return None if x is None else x[here]
