import io
import json

import torch
from rich.console import Console

from narrowcast.cli.view.doctor_view import print_device
from narrowcast.hardware import Hardware, Speeds, keep_speeds
from narrowcast.hardware.speeds import known_speeds
from narrowcast.numerics import FORMATS

SPEEDS = Speeds(
    gpu="NVIDIA H200",
    torch="2.13.0",
    date="2026-01-31",
    tokens=(1024, 16384),
    inputs=(1024, 4096),
    outputs=(1024, 4096),
    seconds={
        "bf16": (1.0,) * 8,
        "tensor": (1.0,) * 8,
        "delayed": (9.0, 9.0, 9.0, 9.0, 2.0, 1.0, 0.8, 0.5),
    },
)


def test_every_format_is_said_to_be_native_emulated_or_impossible(narrowcast):
    ended = narrowcast("doctor")
    assert (ended.code, ended.err) == (0, "checking this machine …\n")
    rows = {line.split()[0]: line for line in ended.out.splitlines() if line.split()[2:]}
    assert "● native" in rows["fp32"]
    for name in FORMATS:
        assert any(word in rows[name] for word in ("native", "emulated", "impossible"))


def test_json_has_versions_devices_and_a_policy_that_can_be_used(narrowcast, tiny):
    found = json.loads(narrowcast("doctor", "--json").out)
    assert found["environment"]["torch"] == torch.__version__
    assert {device["device"] for device in found["devices"]} >= {"cpu"}
    policy = found["recommended"]["policy"]
    assert narrowcast("plan", tiny, f"precision.policy={policy}").code == 0


def test_measuring_without_a_gpu_is_refused_with_what_to_write(narrowcast, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = narrowcast("doctor", "--measure")
    assert ended.code == 3
    assert "compute capability 8.9" in ended.err
    assert "Leave --measure out" in " ".join(ended.err.split())
    assert not (tmp_path / "narrowcast" / "speeds").exists()


def test_what_was_measured_is_found_by_the_gpus_name_and_its_gains_are_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_speeds(SPEEDS)
    found = known_speeds("NVIDIA H200")
    assert found == SPEEDS
    gpu = Hardware(device="cuda:0", name="NVIDIA H200", memory_bytes=2**37, speeds=found)
    assert Speeds.from_json(gpu.to_json()["speeds"]) == SPEEDS
    shown = io.StringIO()
    print_device(Console(file=shown, width=120), gpu)
    rows = {line.split()[0]: line.split()[1:] for line in shown.getvalue().splitlines() if line}
    # At the most tokens: one over the time of fp8, where bf16 takes one second.
    assert rows["1024"] == ["0.50", "×", "1.00", "×"]
    assert rows["4096"] == ["1.25", "×", "2.00", "×"]
    assert "16384 tokens" in shown.getvalue()


def test_a_gpu_of_which_nothing_is_known_has_no_table_of_gains():
    shown = io.StringIO()
    gpu = Hardware(device="cuda:0", name="NVIDIA H200", memory_bytes=2**37)
    print_device(Console(file=shown, width=120), gpu)
    assert "fp8 linear layers" not in shown.getvalue()
