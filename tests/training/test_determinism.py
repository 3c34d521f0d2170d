import pytest
import torch

from narrowcast.training.train_loop import deterministic_kernels


def test_what_was_set_before_is_set_again_after():
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_kernels(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_kernels_are_not_set_unless_asked_for():
    with deterministic_kernels(False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_an_operation_without_a_deterministic_kernel_is_refused():
    x = torch.rand(8, device="cuda", requires_grad=True)
    with deterministic_kernels(True), pytest.raises(RuntimeError, match="deterministic"):
        torch.nn.functional.max_unpool1d(
            x.view(1, 1, 8), torch.arange(8, device="cuda").view(1, 1, 8), 1
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_of_attention_is_the_same_every_time(dtype):
    """At this size its usual kernels differ from call to call."""
    torch.manual_seed(0)
    shape = (8, 12, 1024, 64)
    parts = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]

    def gradients():
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(*parts, is_causal=True)
        return torch.autograd.grad(out.float().square().sum(), parts)

    with deterministic_kernels(True):
        first = gradients()
        for _ in range(5):
            assert all(map(torch.equal, first, gradients()))
