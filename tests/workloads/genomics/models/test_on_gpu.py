"""What only a GPU can show: that nothing waits for it, and that it computes what a CPU does."""

import copy

import pytest
import torch
import torch.nn.functional as F

from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.hyena import HyenaOperator
from narrowcast.workloads.genomics.models.model import GenomicModel
from narrowcast.workloads.genomics.models.patches import ByteLM, threshold_for


def patched(backbone="hyena"):
    torch.manual_seed(0)
    tokens, byte_lm = torch.randint(3, 7, (4, 500)), ByteLM(8)
    config = GenomicConfig(
        vocab_size=8,
        width=64,
        max_length=512,
        backbone=backbone,
        patching="entropy",
        entropy_threshold=threshold_for(byte_lm.entropy(tokens), patch_size=3),
    )
    return GenomicModel(config, byte_lm=byte_lm), tokens


@pytest.mark.parametrize("backbone", ["hyena", "attention", "cnn"])
def test_a_step_never_waits_for_the_device(backbone, cuda):
    model, tokens = patched(backbone)
    model, tokens = model.to(cuda), tokens.to(cuda)
    mask = torch.arange(500, device=cuda) < torch.tensor([[500], [300], [20], [1]], device=cuda)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            states = model(tokens, mask)
        states.float().square().mean().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("causal", [True, False])
def test_a_gpu_computes_what_a_cpu_does(causal, cuda):
    torch.manual_seed(0)
    plain = HyenaOperator(64, order=3, max_length=3000, causal=causal)
    fast = copy.deepcopy(plain).to(cuda)
    x = torch.randn(3, 2500, 64)
    expected = plain.double()(x.double())
    expected.sum().backward()
    found = fast(x.to(cuda))
    found.sum().backward()
    # The errors of fp32 sums over 2500 letters, twice.
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=1e-3)
    for one, other in zip(fast.parameters(), plain.parameters(), strict=True):
        error = (one.grad.cpu().double() - other.grad).norm() / other.grad.norm()
        assert error < 1e-4


def test_a_million_letters_fit_in_a_few_gigabytes(cuda):
    operator = HyenaOperator(64, max_length=2**20).to(cuda)
    x = torch.randn(1, 2**20, 64, device=cuda, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = operator(x)
    y.sum(dtype=torch.float32).backward()
    # Filters, their network and sequences: about 3 KiB a letter; a matrix of attention has 2 TiB.
    assert torch.cuda.max_memory_allocated() < 8 * 2**30
    assert x.grad.isfinite().all()


def test_a_captured_step_gives_the_same(cuda):
    torch.manual_seed(0)
    operator = HyenaOperator(32, max_length=512).to(cuda)
    x = torch.randn(2, 500, 32, device=cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            operator(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = [p.grad / 3 for p in operator.parameters()]
    operator.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(x).square().sum().backward()
    graph.replay()
    for parameter, other in zip(operator.parameters(), expected, strict=True):
        assert F.mse_loss(parameter.grad, other).sqrt() <= 1e-4 * other.norm()
