import pytest
import torch

from narrowcast.hardware.transfers import AsyncCopy


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_values_are_those_at_the_time_the_copy_was_made(device):
    tensor = torch.tensor(1.5, device=device)
    number = AsyncCopy(tensor)
    tensor.add_(1)
    assert number.wait().item() == 1.5


@pytest.mark.gpu
def test_waiting_for_a_copy_does_not_wait_for_what_was_queued_after_it():
    number = AsyncCopy(torch.tensor(1.5, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # about half a second
    later = torch.cuda.Event()
    later.record()
    assert number.wait().item() == 1.5
    assert not later.query()
    torch.cuda.synchronize()
