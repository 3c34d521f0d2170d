import pytest
import torch

from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Speeds
from narrowcast.hardware.speeds import FROZEN, KINDS
from narrowcast.precision.fp8 import measure as speed_trial
from narrowcast.precision.fp8.measure import measure_speeds


@pytest.fixture
def gpu_with_fp8(cuda):
    if torch.cuda.get_device_capability(cuda) < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    return cuda


@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_a_device_without_fp8_products_is_refused_with_what_to_do(device):
    told = []
    with pytest.raises(UnsupportedError, match=rf"got {device}. Leave --measure out"):
        measure_speeds(torch.device(device), told.append)
    assert told == []


def test_every_kind_and_shape_is_timed(monkeypatch, gpu_with_fp8):
    monkeypatch.setattr(speed_trial, "TOKENS", (256, 512))
    monkeypatch.setattr(speed_trial, "WIDTHS", (256, 1024))
    told = []
    found = measure_speeds(gpu_with_fp8, told.append)
    assert isinstance(found, Speeds)
    assert found.gpu == torch.cuda.get_device_name()
    assert (found.tokens, found.inputs, found.outputs) == ((256, 512), (256, 1024), (256, 1024))
    kinds = speed_trial._kinds(torch.cuda.get_device_capability())
    assert len(told) == len(kinds) + 1  # and the host
    assert list(found.seconds) == kinds
    assert list(found.host_seconds) == [kind for kind in kinds if kind not in FROZEN]
    # As it is read again: a time for each shape, and none that nothing takes.
    assert Speeds.from_json(found.to_json()) == found
    assert all(len(times) == 2**3 for times in found.seconds.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_is_at_least_that_of_the_arithmetic(kind, gpu_with_fp8):
    """Two products of tokens · inputs · outputs at least, which no GPU makes at 20 PFLOP/s.

    However busy it is: a time can only be longer. One of an empty graph would be shorter.
    """
    if kind not in speed_trial._kinds(torch.cuda.get_device_capability()):
        pytest.skip(f"needs a GPU with products scaled by {kind}")
    seconds = speed_trial._seconds(kind, 16384, 4096, 4096, device=gpu_with_fp8)
    assert seconds > 4 * 16384 * 4096 * 4096 / 2e16
