"""Law 4: split master weights follow fp32 AdamW exactly; no update that fp32 keeps is lost."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import narrowcast as nc

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
}


class Weights(nn.Module):
    """Weights and nothing else: their gradients are the factors they are multiplied by."""

    def __init__(self, values):
        super().__init__()
        self.first = nn.Parameter(values.clone())
        self.second = nn.Parameter(values.flip(0).clone())

    def loss(self, gradient):
        return ((self.first.float() + self.second.float()) * gradient).sum()


@pytest.mark.parametrize("clip_norm", [None, 0.7])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", ["split", "fp32"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-12, 3))
def test_exact_masters_equal_torchs_fp32_optimizer_bit_for_bit(
    kind, optimizer, clip_norm, seed, exponent
):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(33, generator=generator)
    mine, theirs = Weights(values), Weights(values)
    policy = f"fp32, params=bf16, master={kind}"
    run = nc.prepare(mine, optimizer(mine.parameters()), policy=policy, clip_norm=clip_norm)
    plain = optimizer(theirs.parameters())
    for _ in range(8):
        # Gradients both can hold, so that they are the same to both.
        drawn = torch.randn(33, generator=generator) * 2.0**exponent
        gradient = drawn.bfloat16().float()
        run.step(mine.loss(gradient))
        theirs.loss(gradient).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        plain.step()
        plain.zero_grad()
    full = run.fp32_state_dict()
    assert torch.equal(full["first"], theirs.first)
    assert torch.equal(full["second"], theirs.second)
    assert (mine.first.float() - theirs.first).abs().max() <= 2.0**-8 * theirs.first.abs().max()


def test_no_update_that_fp32_keeps_is_lost():
    def lost(policy):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        run = nc.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-5),
            policy=policy,
            lost_updates_every=1,
        )
        x = torch.randn(8, 64)
        shares = []
        for _ in range(5):
            with run.autocast():
                loss = model(x).float().square().mean()
            shares.append(run.step(loss).lost_updates)
        return max(shares)

    assert lost("fp32, params=bf16, master=split") == lost("fp32") == 0.0
    assert lost("fp32, params=bf16, master=none") > 0.5


def test_a_split_model_trains_like_one_with_an_fp32_copy_beside_it():
    """The same weights in four bytes as in six, through products, clipping and accumulation."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(8, 32)
    ends = []
    for kind in ("split", "fp32"):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = nc.prepare(
            model, optimizer, policy=f"bf16, params=bf16, master={kind}", clip_norm=0.1
        )
        for _ in range(6):
            for half in (x[:4], x[4:]):
                with run.autocast():
                    loss = model(half).float().square().mean() / 2
                run.backward(loss)
            run.step()
        ends.append(run.fp32_state_dict())
    assert all(torch.equal(ends[0][key], value) for key, value in ends[1].items())
