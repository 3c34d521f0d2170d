import json

import torch

from narrowcast.numerics import FORMATS


def test_every_format_is_said_to_be_native_emulated_or_impossible(narrowcast):
    ended = narrowcast("doctor")
    assert (ended.code, ended.err) == (0, "")
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
