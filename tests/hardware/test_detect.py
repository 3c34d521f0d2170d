import json
import re
import subprocess
import sys

import pytest
import torch

from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Hardware, Support, detect_hardware
from narrowcast.hardware.detect import _announced_by_cpu, _cpu_support
from narrowcast.hardware.trial import CpuTrial

FORMATS = ("fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2", "e2m1", "mxfp8", "nvfp4")
# A native product as torch would run it, in a process of its own.
PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.{}); print(float((a @ a)[0, 0]))"


def test_a_cpu_is_described_format_by_format():
    cpu = detect_hardware("cpu")
    assert cpu.device == "cpu"
    assert cpu.memory_bytes > 2**28
    assert set(FORMATS) <= set(cpu.products)
    assert cpu.support("fp32").how == "native"
    assert cpu.support("tf32").reason == "no CPU has tf32 products"


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_product_that_is_called_native_does_not_kill_the_process(name, dtype):
    support = detect_hardware("cpu").support(name)
    command = [sys.executable, "-c", PRODUCT.format(dtype)]
    survived = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if support.how == "native":
        assert survived
    elif name in _announced_by_cpu() and not survived:
        assert support.reason.endswith("but a test process that used one crashed")


@pytest.mark.parametrize(
    ("trial", "how", "says"),
    [
        (None, "emulated", "this CPU has no bf16 products"),
        (CpuTrial(died=True, slowdown=0.0), "emulated", "reports bf16 products, but .* crashed"),
        (CpuTrial(died=False, slowdown=90.0), "emulated", "takes 90.0 × the time of fp32"),
        (CpuTrial(died=False, slowdown=0.9), "emulated", "takes 0.9 × the time of fp32"),
        (CpuTrial(died=False, slowdown=0.25), "native", "4.0 × the rate of fp32, measured"),
    ],
)
def test_a_trial_decides_and_its_reason_says_how_it_went(trial, how, says):
    support = _cpu_support("bf16", {} if trial is None else {"bf16": trial})
    assert support.how == how
    assert re.search(says, support.reason)


def test_a_probe_gives_the_same_answer_when_asked_again():
    assert detect_hardware("cpu") == detect_hardware("cpu")


def test_auto_takes_a_gpu_where_there_is_one():
    expected = "cuda" if torch.cuda.device_count() else "cpu"
    assert torch.device(detect_hardware("auto").device).type in (expected, "mps")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused_with_what_to_write(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"needs a CUDA GPU.*Write device=cpu"):
        detect_hardware(device)


@pytest.mark.parametrize("device", ["gpu", "", "meta", "cpu:x"])
def test_a_device_nobody_knows_is_refused_with_what_to_write(device):
    with pytest.raises(UnsupportedError, match="must be cpu, cuda, mps or auto"):
        detect_hardware(device)


def test_hardware_is_plain_data():
    data = detect_hardware("cpu").to_json()
    assert json.loads(json.dumps(data)) == data


def test_hardware_may_be_made_by_hand_and_what_it_leaves_out_is_emulated():
    h200 = Hardware(
        device="cuda:0",
        name="H200",
        memory_bytes=141 * 2**30,
        capability=(9, 0),
        products={"bf16": Support(how="native", reason="compute capability 9.0")},
    )
    assert h200.support("bf16").how == "native"
    assert h200.support("nvfp4").how == "emulated"


def test_what_was_found_cannot_be_changed_by_accident():
    with pytest.raises(TypeError, match="does not support item assignment"):
        detect_hardware("cpu").products["bf16"] = Support(how="native", reason="wishful")


@pytest.mark.gpu
def test_a_gpu_is_described_by_its_compute_capability():
    gpu = detect_hardware("cuda")
    major, minor = torch.cuda.get_device_capability()
    assert gpu.capability == (major, minor)
    assert (gpu.support("bf16").how == "native") is ((major, minor) >= (8, 0))
    assert (gpu.support("e4m3").how == "native") is ((major, minor) >= (8, 9))
