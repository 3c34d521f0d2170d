import pytest
import torch
from torch import nn

from narrowcast.bench.updates import copying, ours, torch_native
from narrowcast.bench.updates.ours import pass_bytes
from narrowcast.bench.updates.weights import draw
from narrowcast.hardware import probe
from narrowcast.precision.plan.plan import make_plan
from narrowcast.workloads import load_recipe

BUILDS = {
    "fused": lambda weights: torch_native.build(weights, fused=True),
    "foreach": lambda weights: torch_native.build(weights, fused=False),
    "ours": lambda weights: ours.build(weights, policy="fp32"),
    "split": lambda weights: ours.build(weights, policy="bf16, params=bf16, master=split"),
    "scaled": lambda weights: ours.build(weights, policy="fp16, params=fp16, master=fp32"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_an_update_moves_every_weight(name, tiny):
    weights = draw(load_recipe(tiny).recipe)
    before = [p.detach().float().clone() for p in weights.parameters]
    step = BUILDS[name](weights).cases["step"].open()
    step()
    step()  # gradients are there for the second one too
    for p, was in zip(weights.parameters, before, strict=True):
        assert not torch.equal(p.float(), was)


@pytest.mark.parametrize(
    ("policy", "each"),
    [
        # fp32: gradient twice; weight and two moments there and back.
        ("fp32", 2 * 4 + 2 * 12),
        # A split master: 26 bytes in one pass (docs), and the gradient once more for its norm.
        ("bf16, params=bf16, master=split", 26 + 2),
        # Two moments of a byte, and a scale for 256 of each.
        ("bf16, params=bf16, master=split, moments=int8", 26 + 2 - 16 + 2 * 2 * (1 + 4 / 256)),
        # An fp32 master: the working copy is read too, to see whether somebody has written to it.
        ("fp16, params=fp16, master=fp32", 2 * 2 + 2 * 12 + 2 * 2),
    ],
)
def test_bytes_of_one_pass_are_counted_by_format(policy, each):
    planned = make_plan(nn.Linear(8, 8, bias=False), policy, hardware=probe("cpu"))
    assert pass_bytes(planned) == 64 * each


def test_a_copy_reads_and_writes_every_number(tiny):
    weights = draw(load_recipe(tiny).recipe)
    assert copying.build(weights).cases["step"].work == {"bytes": 8.0 * weights.count}


def test_the_weights_of_any_task_can_be_updated(waves):
    weights = draw(waves())
    before = [p.detach().clone() for p in weights.parameters]
    torch_native.build(weights, fused=True).cases["step"].open()()
    assert not any(map(torch.equal, before, weights.parameters))
