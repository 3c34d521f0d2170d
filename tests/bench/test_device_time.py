"""`benchmarks/device_time.py` separates the time of the host from that of the device."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_time.py"

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def queued_seconds():
    spec = importlib.util.spec_from_file_location("device_time", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.queued_seconds


def test_a_slow_host_does_not_count_as_device_time(queued_seconds):
    """The host needs 20 ms to queue a kernel that takes microseconds."""
    filled = torch.empty(2**20, device="cuda")

    def step():
        time.sleep(0.02)
        filled.zero_()

    on_device, on_host = queued_seconds(step, 3, device=filled.device)
    assert len(on_device) == len(on_host) == 3
    assert min(on_host) >= 0.02
    assert max(on_device) < 0.005


def test_a_step_that_waits_has_the_waiting_in_both_times(queued_seconds):
    filled = torch.empty(2**20, device="cuda")

    def step():
        filled.zero_()
        torch.cuda.synchronize()
        time.sleep(0.02)
        filled.zero_()

    on_device, on_host = queued_seconds(step, 3, device=filled.device)
    assert min(on_host) >= 0.02
    assert min(on_device) >= 0.02
