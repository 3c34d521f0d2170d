"""Advice as its reader writes: in a recipe, or in a loop."""

import re

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.gains import in_fp32, widened
from narrowcast.precision.plan.policy import PRESETS, short_text
from narrowcast.precision.plan.wording import Wording

POLICIES = [*PRESETS, "fp16; a: fp32", "fp16, params=bf16; a.*: bf16, params=fp32; b: compute=e4m3"]


@pytest.mark.parametrize("text", POLICIES)
def test_a_policy_is_written_with_its_presets_name_and_read_again(text):
    policy = nc.policy(text)
    assert nc.policy(short_text(policy)) == policy
    assert len(short_text(policy)) <= len(str(policy))


@pytest.mark.sampled(times=1)
@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("module", ["a.b", "b", "head", ""])
def test_what_is_advised_in_a_loop_is_a_policy_that_gives_the_module_its_format(text, module):
    before = nc.policy(text)
    (advised,) = re.findall('policy="(.*)"', Wording(policy=before).wider(module, "bf16"))
    after = nc.policy(advised).for_module(module or "elsewhere")
    assert (after.forward, after.grad_input, after.grad_weight) == ("bf16",) * 3
    assert after.output_format == "bf16"
    name = module or "elsewhere"
    assert after.params == before.for_module(name).params


def test_what_is_advised_in_a_recipe_is_one_of_its_words():
    words = Wording(policy=nc.policy("fp16; a: params=fp32"), in_recipe=True)
    assert words.wider("b", "bf16") == 'precision.overrides={"b": bf16}'
    assert words.wider("a", "bf16") == 'precision.overrides={"a": "bf16, params=fp32"}'
    assert words.wider("", "bf16") == 'precision.policy="bf16; a: params=fp32"'
    assert words.loss_scale("max_scale", "64") == "precision.loss_scale.max_scale=64"


def test_in_fp32_no_product_is_left_in_another_format():
    policy = in_fp32(nc.policy("fp8-tensor, params=bf16; a: fp16; b: bf16, params=fp32"))
    for name in ("", "a", "b", "c", "head"):
        assert policy.for_module(name).forward == "fp32"
    assert policy.exceptions == (("b", "params=fp32"),)
    assert widened(nc.policy("fp16"), "", "bf16") == nc.policy("bf16")


def test_what_a_plan_refuses_is_said_in_words_that_a_loop_has_too():
    hardware = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
    with pytest.raises(UnsupportedError) as refused:
        nc.plan(nn.Linear(16, 16), "bf16", hardware=hardware, emulate=False)
    assert "precision." not in str(refused.value)
    assert "Leave out emulate=false" in str(refused.value)


def test_a_watch_advises_a_policy():
    model = nn.Sequential(nn.Linear(8, 8))
    with nc.monitor(model, policy="fp16", every=1) as watch:
        model(torch.full((4, 8), 1e5)).sum().backward()
        (found,) = [each for each in watch.step() if each.role == "input"]
    assert found.advice == 'try policy="fp16; 0: bf16"'
