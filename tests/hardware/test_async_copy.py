import pytest
import torch

from narrowcast.hardware import transfers
from narrowcast.hardware.transfers import AsyncCopy, HostCopies


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


@pytest.mark.gpu
@pytest.mark.parametrize("kept_free", [0.0, 2.0])
def test_host_copies_hold_what_the_gpu_held_when_they_were_made(kept_free, monkeypatch):
    monkeypatch.setattr(transfers, "KEPT_FREE", kept_free)  # 2.0: there is no room on the GPU
    values = torch.arange(6.0, device="cuda")
    turned = values.view(2, 3).T
    copies = HostCopies({"values": values, "turned": turned})
    values.zero_()
    host = copies.wait()
    assert host["values"].tolist() == [0, 1, 2, 3, 4, 5]
    assert host["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert all(each.is_contiguous() and each.device.type == "cpu" for each in host.values())


@pytest.mark.gpu
def test_making_host_copies_does_not_wait_for_the_gpu():
    tensor = torch.ones(1000, device="cuda")
    HostCopies({"warm": tensor}).wait()
    torch.cuda._sleep(10**9)  # about half a second
    before = torch.cuda.Event()
    before.record()
    copies = HostCopies({"tensor": tensor})
    assert not before.query()
    assert copies.wait()["tensor"].sum() == 1000
