import dataclasses

import pytest

from narrowcast.hardware import Support
from narrowcast.precision.plan.policy import PRESETS, policy_from, recommended


def with_native(hardware, *names):
    native = {name: Support(how="native", reason="measured") for name in names}
    return dataclasses.replace(hardware, products={**hardware.products, **native})


@pytest.mark.parametrize(
    ("native", "expected"),
    [((), "fp32"), (("fp16",), "fp16"), (("fp16", "bf16"), "bf16"), (("e4m3", "bf16"), "bf16")],
)
def test_auto_takes_the_fastest_format_that_is_safe_everywhere(cpu, native, expected):
    hardware = with_native(cpu, *native)
    assert policy_from("auto", hardware) == PRESETS[expected]
    assert recommended(hardware)[0] == expected


def test_auto_takes_exceptions_like_any_preset(h200):
    policy = policy_from("auto; head: fp32", h200)
    assert policy.forward == "bf16"
    assert policy.for_module("head").forward == "fp32"


def test_the_reason_of_a_recommendation_names_the_machine(cpu):
    assert cpu.name in recommended(cpu)[1]


def test_a_policy_that_is_one_already_is_taken_as_it_is():
    assert policy_from(PRESETS["fp16"]) is PRESETS["fp16"]


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-row", "fp8-delayed", "aggressive"])
def test_gradients_of_fp8_presets_have_the_range_of_e5m2(name):
    policy = PRESETS[name]
    assert (policy.forward, policy.grad_input, policy.grad_weight) == ("e4m3", "e5m2", "e5m2")


def test_only_bf16_pure_keeps_weights_without_the_digits_they_lose():
    narrow = [name for name, policy in PRESETS.items() if policy.params != "fp32"]
    assert {name for name in narrow if PRESETS[name].master == "none"} == {"bf16-pure"}
