import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.hardware.catalog import GPUS, find_data_sheet, named_hardware
from narrowcast.precision.plan.rank_costs import choose_strategy, rank_costs

RANKS = 8
POLICIES = ["fp32", "bf16, params=bf16, master=split", "bf16, params=bf16, reduce=bf16"]


def network():
    blocks = [
        nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)) for _ in range(4)
    ]
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks))


class SentBytes(TorchDispatchMode):
    """Adds up what a ring of ranks sends in each kind of collective."""

    def __init__(self, ranks):
        super().__init__()
        self.totals, self._ranks = {}, ranks

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, ranks = function.__name__.split(".")[0], self._ranks
        if function.namespace == "c10d":
            whole = {"_allgather_base_": args[0], "_reduce_scatter_base_": args[1]}.get(name)
            whole = args[0][0] if name == "allreduce_" else whole
            sent = whole.nbytes * (ranks - 1) // ranks * (2 if name == "allreduce_" else 1)
            self.totals[name] = self.totals.get(name, 0) + sent
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("policy", POLICIES)
def test_predicted_shards_and_traffic_are_those_of_fsdp(policy):
    model = network()
    costs = rank_costs(nc.plan(model, policy), ranks=RANKS, strategy="fsdp")
    nc.fully_shard(model, policy=policy)
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy)
    shards = sum(p.to_local().nbytes for p in model.parameters())
    assert shards == pytest.approx(costs.bytes["params"], rel=0.01)
    with SentBytes(RANKS) as sent, run.autocast():
        run.backward(model(torch.ones(2, 16)).square().mean())
    assert sent.totals["_reduce_scatter_base_"] == costs.traffic["reduce-scatter"]
    # The root keeps its weights from the forward to the backward pass.
    root = network()[0].weight.numel() + 64
    gathered = sent.totals["_allgather_base_"] + root * costs.bytes["params"] * RANKS * (
        RANKS - 1
    ) // RANKS // sum(p.numel() for p in network().parameters())
    assert gathered == pytest.approx(costs.traffic["all-gather"], rel=0.02)


def test_ddp_holds_all_and_sends_every_gradient_twice():
    plan = nc.plan(network(), "fp32")
    costs = rank_costs(plan, ranks=4, strategy="ddp")
    assert costs.bytes == {**plan.bytes, "buckets": plan.bytes["grads"]}
    assert costs.traffic == {"all-reduce": math.ceil(2 * plan.bytes["grads"] * 3 / 4)}
    seconds = costs.seconds(link_rate=450, network_rate=50, per_node=8)
    assert seconds == pytest.approx(costs.traffic["all-reduce"] / 450e9)


def test_hsdp_shards_within_a_machine_and_reduces_shards_between_machines():
    plan = nc.plan(network(), "fp32")
    costs = rank_costs(plan, ranks=64, strategy="hsdp", shard=8)
    assert costs.bytes["params"] == math.ceil(plan.bytes["params"] / 8)
    fsdp = rank_costs(plan, ranks=64, strategy="fsdp")
    assert fsdp.bytes["params"] == math.ceil(plan.bytes["params"] / 64)
    rates = {"link_rate": 450, "network_rate": 50, "per_node": 8}
    assert costs.seconds(**rates) < fsdp.seconds(**rates)


@pytest.mark.parametrize("name", GPUS)
def test_policy_for_a_gpu_by_name_is_native_as_its_generation_allows(name):
    hardware = named_hardware(name)
    assert hardware.support("fp16").how == "native"
    bf16 = "native" if hardware.capability >= (8, 0) else "emulated"
    assert hardware.support("bf16").how == bf16
    fp8 = "native" if hardware.capability >= (8, 9) else "emulated"
    assert hardware.support("e4m3").how == fp8


@pytest.mark.parametrize("name", GPUS)
def test_rates_of_a_gpu_double_as_formats_halve(name):
    rates = GPUS[name].tflops
    assert ("fp8" in rates) == (GPUS[name].capability >= (8, 9))
    assert ("bf16" in rates) == (GPUS[name].capability >= (8, 0))
    for narrow, wide in (("fp8", "fp16"), ("bf16", "tf32")):  # without sparsity, for each of them
        if narrow in rates:
            assert rates[narrow] == pytest.approx(2 * rates[wide], rel=0.03)


def test_data_sheet_is_that_of_this_very_gpu_and_not_of_a_similar_name():
    l4, l40s = named_hardware("l4"), named_hardware("l40s")
    assert find_data_sheet(l40s) is GPUS["l40s"]
    slice_of_one = dataclasses.replace(l4, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert find_data_sheet(slice_of_one) is None


def test_unknown_gpu_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"hardware must be one of .*h200.*got 'h20'"):
        named_hardware("h20")


def test_auto_shards_a_model_that_would_fill_a_gpu():
    hardware = named_hardware("l4")
    small = nc.plan(network(), "fp32", hardware=hardware)
    with torch.device("meta"):
        large = nc.plan(nn.Linear(2**15, 2**15, bias=False), "fp32", hardware=hardware)
    one_machine = {"ranks": 8, "per_machine": 8}
    assert choose_strategy(small, "auto", **one_machine) == "ddp"
    assert choose_strategy(large, "auto", **one_machine) == "fsdp"
    assert choose_strategy(large, "auto", ranks=16, per_machine=8) == "hsdp"
    assert choose_strategy(small, "hsdp", **one_machine) == "hsdp"
