"""Moments in the host's memory: the same updates, bit for bit, wherever they lie between steps.

A CPU has nothing to offload, and a plan for one is refused; a plan that says so all the same is
carried out, with both places in the one memory there is, so that all but the copies is tested here.
"""

import contextlib
import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.precision.plan.memory import MemoryPlan
from narrowcast.precision.step.cuda_graph import unsupported_reason
from narrowcast.precision.weights import host_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OFFLOAD = nc.Memory(offload=["optimizer"])
SPLIT = "bf16, params=bf16, master=split"
POLICIES = (
    "fp32",
    SPLIT,
    "bf16, params=bf16, master=kahan",
    "bf16, params=bf16, master=fp32",
    "bf16, params=bf16, master=stochastic",
    f"{SPLIT}, moments=bf16",
    f"{SPLIT}, moments=int8",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()  # by columns
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.sometimes = nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, x, step=0):
        x = self.first(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.last(self.sometimes(x) if step % 2 else x)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(host_moments, "BUCKET_BYTES", 4096)


def prepared(policy=SPLIT, *, offload=True, optimizer=torch.optim.AdamW, **settings):
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-2},
    ]
    plan = nc.plan(model, policy, hardware=nc.detect_hardware(DEVICE))
    if offload:
        plan = dataclasses.replace(plan, memory=MemoryPlan(requested=OFFLOAD))
    settings = {"fused_optimizer": True, "clip_norm": 1.0, **settings}
    return nc.prepare(model, optimizer(groups, lr=1e-2), policy=plan, **settings)


def trained(run, first=0, steps=5, *, bad=()):
    lost = []
    for step in range(first, first + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        with run.autocast():
            loss = run.model(x, step).square().mean()
        outcome = run.step(loss * (float("inf") if step in bad else 1.0))
        assert outcome.applied is (step not in bad)
        lost.append(outcome.lost_updates)
    return copy.deepcopy(run.state_dict()), lost


def differing(one, other):
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) > 20
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a.cpu(), b.cpu())]


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
        return
    items = value if isinstance(value, list | tuple) else getattr(value, "values", list)()
    for item in items:
        yield from tensors(item)


def homes(run):
    states = run.optimizer.state.values()
    return {value.device.type for state in states for key, value in state.items() if key != "step"}


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_are_those_of_moments_on_the_device_bit_for_bit(policy):
    run = prepared(policy, lost_updates_every=1, ema_decay=0.9)
    kept = prepared(policy, lost_updates_every=1, ema_decay=0.9, offload=False)
    given = [trained(each, steps=6, bad=(2,)) for each in (run, kept)]
    assert differing(given[0][0], given[1][0]) == []
    assert given[0][1] == given[1][1]
    assert homes(run) == {"cpu"}


@pytest.mark.parametrize("policy", [SPLIT, f"{SPLIT}, moments=int8"])
@pytest.mark.parametrize("there", [True, False])
def test_a_run_resumes_bit_for_bit_with_moments_on_the_other_side_too(policy, there):
    whole, _ = trained(prepared(policy, offload=False), steps=4)
    saved, _ = trained(prepared(policy, offload=there), steps=2)
    resumed = prepared(policy, offload=not there)
    trained(resumed, steps=1)
    resumed.load_state_dict(saved)
    assert differing(trained(resumed, 2, 2)[0], whole) == []


def test_release_gives_the_moments_back_to_a_plain_optimizer():
    results = []
    for offload in (True, False):
        run = prepared("fp32", offload=offload)
        trained(run, steps=2)
        optimizer, model = run.optimizer, run.release()
        model(torch.ones(4, 8, device=DEVICE)).square().mean().backward()
        optimizer.step()
        results.append([model.state_dict(), optimizer.state_dict()["state"]])
        assert homes(run) == {DEVICE}
    assert differing(*results) == []


def test_moments_stay_where_they_are_when_the_policy_changes():
    results = []
    for offload in (True, False):
        run = prepared("fp32", offload=offload)
        trained(run, steps=2)
        run.set_policy(
            dataclasses.replace(
                nc.plan(run.model, SPLIT, hardware=run.plan.hardware), memory=run.plan.memory
            )
        )
        results.append(trained(run, 2, 2)[0])
        assert homes(run) == {"cpu" if offload else DEVICE}
    assert differing(*results) == []


def test_an_optimizer_that_is_not_the_fused_one_is_refused():
    for settings in (
        {"optimizer": torch.optim.SGD, "fused_optimizer": None},
        {"fused_optimizer": False},
    ):
        with pytest.raises(UnsupportedError, match=r"Use torch\.optim\.AdamW or Adam, or leave"):
            prepared("fp32", **settings)


def test_many_small_weights_share_a_bucket_and_a_large_one_has_its_own():
    run = prepared("fp32")
    trained(run, steps=2)
    buckets = run.engine.weights.fused._adam._buckets
    assert len(buckets) > 2
    assert [bucket.first for bucket in buckets[1:]] == [bucket.last for bucket in buckets[:-1]]
    sizes = [sum(there.nbytes for there, _ in bucket.pairs) for bucket in buckets]
    assert max(sizes) <= 4096


@pytest.mark.gpu
def test_on_a_gpu_moments_are_pinned_memory_is_less_and_the_host_waits_for_nothing(
    monkeypatch, host_never_waits
):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(host_moments, "BUCKET_BYTES", 2**22)
    held, weights = {}, {}
    for memory in (nc.Memory(), OFFLOAD):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024, device="cuda") for _ in range(16)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = torch.cuda.memory_allocated()
        run = nc.prepare(model, optimizer, policy=SPLIT, memory=memory)
        x = torch.randn(64, 1024, device="cuda")
        for step in range(6):
            with run.autocast():
                loss = run.model(x).square().mean()
            run.sync()
            with host_never_waits() if step == 5 else contextlib.nullcontext():
                run.step(loss)
        del loss
        held[memory] = torch.cuda.memory_allocated() - before
        weights[memory] = run.fp32_state_dict()
        moments = [s["exp_avg"] for s in run.optimizer.state.values()]
        assert all(m.is_pinned() for m in moments) is bool(memory.offload)
        assert bool(memory.offload) == ("offload" in unsupported_reason(run.engine))
    for one, other in zip(*(each.values() for each in weights.values()), strict=True):
        assert torch.equal(one, other)
    parameters = sum(p.numel() for p in model.parameters())
    kept, offloaded = held.values()
    assert kept - offloaded > 8 * parameters - 4 * 2**23
