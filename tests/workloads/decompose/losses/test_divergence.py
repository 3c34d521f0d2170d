"""Divergences, against torch's own and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from narrowcast.workloads.decompose.losses import divergence as module
from narrowcast.workloads.decompose.losses.divergence import divergence

SEEDS, COPIES, ROWS, WIDTH = 2, 3, 5, 7


def logits(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_kl_goes_from_the_target_to_the_output_and_sums_over_the_width():
    target = torch.tensor([[[0.0, math.log(3)]]], dtype=torch.float64)  # 1/4 and 3/4
    output = torch.zeros(1, 1, 1, 2, dtype=torch.float64, requires_grad=True)  # 1/2 and 1/2
    found = divergence(output, target, "kl")
    found.backward()
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert found.item() == pytest.approx(expected, rel=1e-14)
    assert output.grad.flatten().tolist() == pytest.approx([0.5 - 0.25, 0.5 - 0.75], rel=1e-14)


@pytest.mark.parametrize("piece", [1, 2 * SEEDS * COPIES * WIDTH, 2**24])
def test_kl_is_torchs_whatever_the_pieces_it_is_made_in(piece, monkeypatch):
    monkeypatch.setattr(module, "PIECE", piece)
    output, target = logits(SEEDS, COPIES, ROWS, WIDTH).requires_grad_(), logits(SEEDS, ROWS, WIDTH)
    found = divergence(output, target, "kl")
    for seed in range(SEEDS):
        every = [
            F.kl_div(
                output[seed, copy].log_softmax(-1),
                target[seed].log_softmax(-1),
                reduction="batchmean",  # over rows
                log_target=True,
            )
            for copy in range(COPIES)
        ]
        mean = torch.stack(every).mean()
        torch.testing.assert_close(found[seed], mean, rtol=1e-12, atol=0)
        weight = 1.0 + seed
        (expected,) = torch.autograd.grad(weight * mean, output, retain_graph=True)
        (grad,) = torch.autograd.grad(weight * found[seed], output, retain_graph=True)
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-15)


def test_mse_is_the_mean_over_all_numbers_of_a_seed():
    output, target = logits(SEEDS, COPIES, ROWS, WIDTH), logits(SEEDS, ROWS, WIDTH)
    found = divergence(output, target, "mse")
    for seed in range(SEEDS):
        every = [F.mse_loss(output[seed, copy], target[seed]) for copy in range(COPIES)]
        torch.testing.assert_close(found[seed], torch.stack(every).mean())


def test_equal_logits_of_16_bits_have_no_divergence_and_are_compared_in_fp32():
    output = torch.randn(1, 1, 4, 50).bfloat16()
    found = divergence(output, output[:, 0], "kl")
    assert found.dtype == torch.float32
    assert found.abs().item() < 1e-6


def test_the_target_is_a_constant():
    target = logits(1, 2, 3).requires_grad_()
    for kind in ("mse", "kl"):
        output = logits(1, 1, 2, 3).requires_grad_()
        divergence(output, target, kind).sum().backward()
        assert target.grad is None


@pytest.mark.interpreted
def test_the_kernel_compares_as_plain_torch_does():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    output = torch.randn(2, 3, 5, 7).to(device).requires_grad_()
    target = torch.randn(2, 5, 7).to(device)
    found = divergence(output, target, "kl")
    (grad,) = torch.autograd.grad((found * torch.tensor([1.0, 2.0]).to(device)).sum(), output)
    exact_output = output.detach().double().requires_grad_()
    exact = divergence(exact_output, target.double(), "kl")
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
    (exact_grad,) = torch.autograd.grad((exact * weights).sum(), exact_output)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-5, atol=1e-7)
