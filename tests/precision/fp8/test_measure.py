import itertools

import pytest
import torch

from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Speeds
from narrowcast.hardware.speeds import KINDS
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
    with pytest.raises(UnsupportedError, match=rf"and {device} is none; leave --measure out"):
        measure_speeds(torch.device(device), told.append)
    assert told == []


def test_every_kind_and_shape_is_timed_and_a_larger_one_takes_longer(monkeypatch, gpu_with_fp8):
    monkeypatch.setattr(speed_trial, "TOKENS", (256, 8192))
    monkeypatch.setattr(speed_trial, "WIDTHS", (256, 4096))
    told = []
    found = measure_speeds(gpu_with_fp8, told.append)
    assert isinstance(found, Speeds)
    assert found.gpu == torch.cuda.get_device_name()
    assert (found.tokens, found.inputs, found.outputs) == ((256, 8192), (256, 4096), (256, 4096))
    assert len(told) == len(KINDS) == len(found.seconds)
    for times in found.seconds.values():
        by_shape = dict(zip(itertools.product((0, 1), repeat=3), times, strict=True))
        # 8192 times the arithmetic; small products take a launch's time whatever they are.
        assert by_shape[1, 1, 1] > 4 * by_shape[0, 0, 0] > 0
    assert Speeds.from_json(found.to_json()) == found
    assert set(found.host_seconds) == {"bf16", "tensor", "delayed", "row", "block"} & set(KINDS)
    # A host takes microseconds over a call, and no layer has a thousand.
    assert all(1e-6 < value < 1e-2 for value in found.host_seconds.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_is_that_of_the_arithmetic(kind, gpu_with_fp8):
    """6 · tokens · inputs · outputs operations, on no GPU that makes more than 20 PFLOP/s."""
    seconds = speed_trial._seconds(kind, 16384, 4096, 4096, device=gpu_with_fp8)
    operations = 6 * 16384 * 4096 * 4096
    assert 1e13 < operations / seconds < 2e16
