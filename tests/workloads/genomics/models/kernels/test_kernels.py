"""Kernels of convolutions against plain torch: on a GPU, or in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from narrowcast.kernels.launch import interpreted
from narrowcast.workloads.genomics.models import transforms
from narrowcast.workloads.genomics.models.convolution import gated_convolution

pytest.importorskip("triton")
from narrowcast.workloads.genomics.models.kernels import fused  # noqa: F401  # as it is interpreted
from narrowcast.workloads.genomics.models.kernels.short import short_backward, short_forward

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = pytest.mark.interpreted


def given(gates, *, causal, dtype, rows=2, channels=2, length=520):
    generator = torch.Generator().manual_seed(0)

    def some(*shape, dtype=dtype):
        x = torch.randn(*shape, generator=generator).to(DEVICE, dtype)
        return x.requires_grad_()

    # Views of one projection, as an operator has them.
    whole = some(rows, 3 * channels, length)
    value, before, after = whole.chunk(3, dim=1)
    taps = length if causal else 2 * length - 1
    filters = some(channels, taps, dtype=torch.float32)
    named = {"before": before, "after": after, "bias": some(channels, dtype=torch.float32)}
    return value, filters, {name: named[name] for name in gates}, whole


@pytest.mark.parametrize(
    ("gates", "causal", "dtype"),
    [
        ((), True, torch.float32),
        (("before",), False, torch.float32),
        (("bias", "after"), True, torch.bfloat16),
        (("bias", "before", "after"), False, torch.bfloat16),
        (("bias", "before", "after"), True, torch.float32),
    ],
)
def test_fused_convolutions_and_their_gradients_are_those_of_torch(
    gates, causal, dtype, monkeypatch
):
    value, filters, named, whole = given(gates, causal=causal, dtype=dtype)
    monkeypatch.setattr(transforms, "NUMBERS_AT_ONCE", 576)  # a row at a time
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wanted = [whole, filters, *(t for name, t in named.items() if name == "bias")]
    results = []
    for method in ("torch", "fused"):
        y = gated_convolution(value, filters, causal=causal, chunk=1, method=method, **named)
        grads = torch.autograd.grad((y.float() * weights).sum(), wanted, retain_graph=True)
        results.append((y, *grads))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        # fp32 sums of a thousand products in another order; then a rounding that may differ.
        eps = torch.finfo(one.dtype).eps if one.dtype != torch.float32 else 0.0
        size = one.float().abs().max()
        assert ((one - other).float().abs() <= one.float().abs() * eps + size * 4e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("left", [1, 2])
def test_short_convolutions_and_their_gradients_are_those_of_torch(left, dtype):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(s, generator=generator) for s in ((2, 130, 70), (2, 70, 130)))
    weight, bias = (torch.randn(s, generator=generator).to(DEVICE) for s in ((70, 3), (70,)))
    x, grad = x.to(DEVICE, dtype), grad.to(DEVICE, dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    padded = F.pad(leaves[0].transpose(1, 2), (left, 2 - left))
    exact = F.conv1d(padded, leaves[1][:, None], leaves[2], groups=70)
    expected = [exact, *torch.autograd.grad(exact, leaves, grad.double())]
    found = [short_forward(x, weight, bias, left), *short_backward(grad, x, weight, left)]
    for one, other in zip(found, expected, strict=True):
        eps = torch.finfo(one.dtype).eps
        size = 1 if one.ndim == 3 else other.abs().max()
        assert ((one - other).abs() <= other.abs() * eps + 1e-5 * size).all()
