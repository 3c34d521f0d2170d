"""Implicit filters against their formula, written for one tap."""

import math

import pytest
import torch

from narrowcast.workloads.genomics.models.hyena import (
    HyenaOperator,
    ImplicitFilter,
    filter_parameters,
)


def tap(made, t, *, row, rate):
    """One tap of one row of the output, in Python's own floats."""
    length = made.max_length
    angles = [2 * math.pi * t / length * f for f in (1e-4, 1.0)]
    x = [t / (length - 1), *map(math.cos, angles), *(-math.sin(a) for a in angles)]
    for weight, bias in zip(made.weights, made.biases, strict=True):
        sums = [
            sum(w * each for w, each in zip(line, x, strict=True)) + b
            for line, b in zip(weight.tolist(), bias.tolist(), strict=True)
        ]
        x = [math.sin(w * each) for w, each in zip(made.frequency.tolist(), sums, strict=True)]
    value = sum(w * each for w, each in zip(made.output[row].tolist(), x, strict=True))
    return value * math.exp(-rate * t / (length - 1))


def test_taps_are_those_of_the_formula():
    torch.manual_seed(0)
    made = ImplicitFilter(3, max_length=20, causal=False, orders=2, hidden=8).double()
    filters = made(12)
    assert filters.shape == (2, 3, 23)
    slow, fast = -math.log(0.01) / 1.5, -math.log(0.01) / 0.3
    rates = [slow, (slow + fast) / 2, fast]
    for order, lag, channel in [(0, 0, 0), (1, 7, 1), (1, 11, 2)]:
        expected = tap(made, lag, row=order * 6 + channel, rate=rates[channel])
        assert filters[order, channel, 11 + lag].item() == pytest.approx(expected, abs=1e-6)
    for order, lag, channel in [(0, 1, 0), (1, 11, 2)]:
        expected = tap(made, lag, row=order * 6 + 3 + channel, rate=rates[channel])
        assert filters[order, channel, 11 - lag].item() == pytest.approx(expected, abs=1e-6)


def test_a_filter_of_another_length_has_the_same_taps():
    torch.manual_seed(0)
    made = ImplicitFilter(4, max_length=32)
    torch.testing.assert_close(made(10)[..., :10], made(100)[..., :10])
    assert made(100).isfinite().all()


def test_parameters_of_filters_are_told_from_others():
    operator = HyenaOperator(8, max_length=16)
    found = {id(p) for p in filter_parameters(operator)}
    named = dict(operator.named_parameters())
    assert found == {id(p) for name, p in named.items() if name.startswith("filter.")}
    assert len(found) == 9
