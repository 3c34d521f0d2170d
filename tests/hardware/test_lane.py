"""Copies beside the computation: what is copied is what was there, and nobody but queues waits."""

import pytest
import torch

from narrowcast.hardware.transfers import Lane, mark_now, on_host, wait_for


def test_without_a_gpu_copies_are_done_at_once_and_nothing_is_waited_for():
    cpu = torch.device("cpu")
    source, into = torch.arange(6.0), torch.zeros(6)
    mark = Lane(cpu).copy([(into, source)], after=[mark_now(cpu)])
    wait_for(mark, cpu)
    assert mark is None
    assert torch.equal(into, source)


def test_a_place_on_the_host_lies_as_what_it_is_for():
    columns = torch.zeros(3, 5, dtype=torch.bfloat16).t()
    assert on_host(columns).stride() == columns.stride()
    assert on_host(columns).dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_copy_waits_for_what_makes_its_source_and_the_computation_for_the_copy(
    cuda, host_never_waits
):
    lanes = Lane(cuda), Lane(cuda)
    x = torch.randn(2048, 2048, device=cuda)
    host, back = on_host(x), torch.empty_like(x)
    torch.cuda.synchronize()
    with host_never_waits():
        y = x
        for _ in range(20):
            y = (y @ x).tanh()
        down = lanes[0].copy([(host, y)], after=[mark_now(cuda)])
        up = lanes[1].copy([(back, host)], after=[down])
        wait_for(up, cuda)
        difference = (back - y).abs().max()
    assert host.is_pinned()
    assert difference.item() == 0
