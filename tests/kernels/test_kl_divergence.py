import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from

from narrowcast.kernels import kl_divergence
from narrowcast.kernels.kl_divergence import kl_rows, kl_rows_grad
from narrowcast.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""With the mantissa bits that are stored."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let rows of a few dozen logits take several blocks, as rows of 50304 do."""
    monkeypatch.setattr(kl_divergence, "BLOCK", 32)


def drawn(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).to(dtype).to(DEVICE)


@given(
    groups=integers(1, 2),
    copies=integers(1, 3),
    rows=integers(1, 4),
    columns=sampled_from([1, 2, 31, 32, 33, 70]),  # a kernel is compiled for each
    dtype=sampled_from(list(DTYPES)),
    seed=integers(0, 99),
)
@settings(max_examples=12)
def test_divergences_and_gradients_are_those_of_float64(groups, copies, rows, columns, dtype, seed):
    output = drawn(groups, copies, rows, columns, dtype=dtype, seed=seed)
    target = drawn(groups, rows, columns, dtype=dtype, seed=seed + 100)
    factors = drawn(groups, dtype=torch.float32, seed=seed + 200)
    losses, wholes = kl_rows(output, target)
    grad = kl_rows_grad(output, target, wholes, factors)

    wide = output.double().requires_grad_()
    known = target.double().log_softmax(-1)[:, None].expand(wide.shape)
    exact = F.kl_div(wide.log_softmax(-1), known, reduction="none", log_target=True).sum(-1)
    (slope,) = torch.autograd.grad((exact.sum((1, 2)) * factors).sum(), wide)
    # Sums of logits below 16, each rounded to 24 bits.
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=2e-5, atol=1e-5)
    rounding = 2.0 ** -DTYPES[dtype]
    torch.testing.assert_close(grad.double(), slope, rtol=rounding + 1e-5, atol=2e-6)
    assert grad.dtype == dtype


def test_equal_logits_are_not_apart_however_large():
    logits = drawn(1, 4, 70, dtype=torch.float32, seed=0) + 1000
    losses, _ = kl_rows(logits[:, None], logits)
    assert losses.abs().max() < 1e-6


def test_a_nan_is_seen():
    output = drawn(1, 1, 2, 40, dtype=torch.float32, seed=0)
    target = drawn(1, 2, 40, dtype=torch.float32, seed=1)
    output[0, 0, 0, 5] = torch.nan
    losses, _ = kl_rows(output, target)
    assert losses[0, 0, 0].isnan()
    assert losses[0, 0, 1].isfinite()
