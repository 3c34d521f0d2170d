"""Whether a raised module could return: its samples, asked about the format it came from."""

import pytest
import torch

from narrowcast.health.statistics.grouping import WhatIf, make_site, unsafe_to_lower
from narrowcast.precision.plan.policy import policy_from


def drawn(*, times=1.0):
    sample = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    return sample / sample.abs().max() * times  # whose largest is known


def misfits(policy, role, sample, *, scaled=False):
    there = [make_site("a", role, policy_from("bf16"), sample=sample)]
    supposed = WhatIf(there, {"a": policy_from(policy)})
    return [*unsafe_to_lower(supposed.sites, supposed.rows().tolist(), scaled=scaled)]


@pytest.mark.parametrize("role", ["input", "weight", "output", "grad_output"])
def test_fp16_must_hold_twice_the_largest(role):
    assert misfits("fp16", role, drawn(times=32700.0)) == []
    assert misfits("fp16", role, drawn(times=32800.0)) == ["a"]
    assert misfits("fp16", role, torch.full((4096,), torch.inf)) == ["a"]


def test_gradients_that_a_loss_scale_gives_way_to_fit():
    assert misfits("fp16", "grad_output", drawn(times=1e6), scaled=True) == []
    assert misfits("fp16", "input", drawn(times=1e6), scaled=True) == ["a"]


@pytest.mark.parametrize("policy", ["fp16", "fp8-tensor", "fp8-delayed"])
def test_gradients_that_would_round_to_zero_do_not_fit_and_activations_do(policy):
    lost = drawn(times=1e3)
    lost[: len(lost) // 5] *= 2.0**-60  # a fifth of them: less than is told, and too near to it
    assert misfits(policy, "grad_output", lost, scaled=True) == ["a"]
    assert misfits(policy, "input", lost) == []
    assert misfits(policy, "grad_output", drawn(), scaled=True) == []


def test_a_module_is_named_once_and_others_are_not():
    large = drawn(times=1e6)
    sites = [
        make_site(name, role, policy_from("bf16"), sample=large)
        for name in ("a", "b")
        for role in ("input", "output", "update")
    ]
    supposed = WhatIf(sites, {"b": policy_from("fp16")})
    assert len(supposed.sites) == 2
    assert [*unsafe_to_lower(supposed.sites, supposed.rows().tolist(), scaled=False)] == ["b"]


def test_where_nothing_is_raised_there_is_nothing_to_ask():
    supposed = WhatIf([make_site("a", "input", policy_from("bf16"), sample=drawn())], {})
    assert supposed.sites == []
    assert supposed.rows().numel() == 0
