import pytest
import torch

from narrowcast.training.host_number import HostNumber


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_number_is_the_one_at_the_time_it_was_taken(device):
    tensor = torch.tensor(1.5, device=device)
    number = HostNumber(tensor)
    tensor.add_(1)
    assert number.value() == 1.5


@pytest.mark.gpu
def test_reading_a_number_does_not_wait_for_what_was_queued_after_it():
    number = HostNumber(torch.tensor(1.5, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # about half a second
    later = torch.cuda.Event()
    later.record()
    assert number.value() == 1.5
    assert not later.query()
    torch.cuda.synchronize()
