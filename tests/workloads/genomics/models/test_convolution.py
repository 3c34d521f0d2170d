"""Convolutions by FFT against sums written out, in fp64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.models import transforms
from narrowcast.workloads.genomics.models.convolution import gated_convolution
from narrowcast.workloads.genomics.models.transforms import fast_length


def direct(u, filters, *, causal):
    """Every pair of letters, by torch's own convolution of images: a cross-correlation."""
    length, taps = u.shape[-1], filters.shape[-1]
    ahead = 0 if causal else taps // 2
    padded = F.pad(u, (taps - 1 - ahead, ahead))
    return F.conv1d(padded, filters.flip(-1)[:, None], groups=u.shape[1])[..., :length]


@given(
    rows=integers(1, 3),
    channels=integers(1, 5),
    length=integers(1, 70),
    taps=integers(1, 80),
    chunk=integers(0, 3),
    causal=booleans(),
    seed=integers(0, 1000),
)
@settings(max_examples=60)
def test_equals_the_direct_sum_at_any_length(rows, channels, length, taps, chunk, causal, seed):
    generator = torch.Generator().manual_seed(seed)
    taps = taps if causal else 2 * taps - 1
    u = torch.randn(rows, channels, length, dtype=torch.float64, generator=generator)
    filters = torch.randn(channels, taps, dtype=torch.float64, generator=generator)
    found = gated_convolution(u, filters, causal=causal, chunk=chunk or None)
    torch.testing.assert_close(found, direct(u, filters, causal=causal), rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_direct_sum_over_thousands_of_letters(causal):
    torch.manual_seed(0)
    u = torch.randn(2, 3, 1201, dtype=torch.float64)
    filters = torch.randn(3, 1201 if causal else 2401, dtype=torch.float64) / 50
    found = gated_convolution(u, filters, causal=causal)
    torch.testing.assert_close(found, direct(u, filters, causal=causal), rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gates", [(), ("before",), ("bias", "before", "after")])
def test_gradients_are_those_of_finite_differences(causal, gates):
    torch.manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    more = {name: some(3) if name == "bias" else some(2, 3, 11) for name in gates}

    def function(value, filters, *rest):
        named = dict(zip(gates, rest, strict=True))
        return gated_convolution(value, filters, causal=causal, chunk=2, **named)

    filters = some(3, 7 if causal else 13)
    assert torch.autograd.gradcheck(function, (some(2, 3, 11), filters, *more.values()))


def test_gates_and_bias_are_where_they_are_said_to_be():
    torch.manual_seed(0)
    value, before, after = torch.randn(3, 2, 4, 33, dtype=torch.float64)
    filters, bias = torch.randn(4, 33, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    found = gated_convolution(value, filters, bias=bias, before=before, after=after)
    z = before * value
    expected = after * (direct(z, filters, causal=True) + bias[:, None] * z)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_transformed_in_fp32_and_rounded_once(dtype):
    torch.manual_seed(0)
    u, filters = torch.randn(2, 8, 1000).to(dtype), torch.randn(8, 1000) / 30
    found = gated_convolution(u, filters)
    assert found.dtype == dtype
    exact = direct(u.double(), filters.double(), causal=True)
    # Half a spacing of the format, and the errors of sums of a thousand products in fp32.
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5
    assert ((found.double() - exact).abs() <= bound).all()


def test_only_what_came_in_is_kept_for_the_backward_pass():
    kept = []
    u = torch.randn(2, 8, 500, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.randn(2, 8, 500, dtype=torch.bfloat16, requires_grad=True)
    filters = torch.randn(8, 500, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_convolution(u, filters, before=gate, after=gate)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (u, gate, filters)}


def test_compiles_into_one_graph_with_equal_gradients():
    torch.manual_seed(0)
    u, filters = torch.randn(2, 4, 50, requires_grad=True), torch.randn(4, 50, requires_grad=True)
    plain = torch.autograd.grad(gated_convolution(u, filters).square().sum(), (u, filters))
    compiled = torch.compile(gated_convolution, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(u, filters).square().sum(), (u, filters))
    torch.testing.assert_close(plain, again)


@given(length=integers(1, 2_000_000))
def test_a_fast_length_is_long_enough_and_has_small_factors(length):
    fast = fast_length(length)
    assert length <= fast <= max(1.21 * length, length + 1)
    for factor in (2, 3, 5, 7):
        while fast % factor == 0:
            fast //= factor
    assert fast == 1


def test_a_two_sided_filter_without_a_middle_is_refused():
    with pytest.raises(ConfigError, match="odd number of taps"):
        gated_convolution(torch.ones(1, 1, 4), torch.ones(1, 4), causal=False)


def test_pieces_of_any_size_give_the_same(monkeypatch):
    torch.manual_seed(0)
    some = [torch.randn(5, 3, 20, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias, filters = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (3, (3, 20)))
    results = []
    for numbers in (1, 40, 2**20):
        monkeypatch.setattr(transforms, "NUMBERS_AT_ONCE", numbers)
        y = gated_convolution(some[0], filters, bias=bias, before=some[1], after=some[2])
        results.append((y, *torch.autograd.grad(y.square().sum(), (*some, bias, filters))))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])
