"""Models that are trained in threads of their own end as if they were alone."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import narrowcast as nc

KINDS = ("fp32", "split", "kahan", "stochastic")
POLICIES = ["fp32", "bf16", *(f"bf16, params=bf16, master={kind}" for kind in KINDS)]


@pytest.fixture
def eager_threads():
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def trained(policy, seed, *, steps=12):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy=policy)
    for _ in range(steps):
        with run.autocast():
            loss = model(torch.randn(32, 16, generator=generator)).float().square().mean()
        run.step(loss)
    return run.fp32_state_dict()


@pytest.mark.parametrize("policy", POLICIES)
def test_two_models_trained_in_two_threads_end_as_alone(policy, eager_threads):
    alone = [trained(policy, seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda seed: trained(policy, seed), range(2)))
    for one, other in zip(alone, ends, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
