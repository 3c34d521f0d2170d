import pytest
import torch
from torch import nn
from torch.optim import AdamW

from narrowcast.bench.zoo.built import as_built
from narrowcast.bench.zoo.models import ZOO
from narrowcast.bench.zoo.ways import (
    AMP,
    BF16,
    FP8_SPLIT,
    LIGER,
    TORCHAO,
    WAYS,
    ZooTrial,
    make_step,
    trials,
)
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.plan.policy import policy_from

CPU = torch.device("cpu")


def test_liger_is_asked_of_models_it_knows_only_and_torchao_compiled_only():
    found = trials(ZOO, ways=[], modes=[])
    assert {t.model for t in found if t.way == LIGER} == {"llama-348m", "llama-1.3b", "qwen2-0.5b"}
    assert {t.mode for t in found if t.way == TORCHAO} == {"compiled"}
    assert {t.model for t in found if t.way == TORCHAO} == set(ZOO)


def test_whom_others_are_compared_with_comes_first():
    first, *_ = trials(["vit-l"], ways=["ours", "amp"], modes=["compiled", "eager"])
    assert first == ZooTrial(model="vit-l", way=AMP, mode="eager")


def test_a_single_row_is_named_beside_kinds():
    found = trials(["unet"], ways=[FP8_SPLIT, "amp"], modes=["compiled"])
    assert [trial.way for trial in found] == [AMP, FP8_SPLIT]
    (one,) = trials(["unet"], ways=[BF16], modes=["graphed"])
    assert one == ZooTrial(model="unet", way=BF16, mode="graphed")


def test_graphs_are_ours_and_only_where_there_are_some():
    found = {t.way for t in trials(["unet"], ways=[], modes=[]) if t.mode == "graphed"}
    ours = {way.name for way in WAYS.values() if way.kind == "ours"}
    assert found == ours


@pytest.mark.parametrize(
    ("ways", "modes", "answer"),
    [
        (["apm"], [], "--ways must be any of amp, liger, torchao, ours, AMP.*, got apm"),
        (["bf 16"], [], r"bf16, 'bf16 \+ split', 'fp8-delayed \+ split', got bf 16"),
        ([], ["jit"], "--modes must be any of eager, compiled, graphed, got jit"),
        (["torchao"], ["eager"], "torchao has only compiled rows"),
        ([TORCHAO], ["eager"], "--ways 'torchao tensorwise' --modes eager selects no row"),
    ],
)
def test_unknown_ways_and_modes_raise(ways, modes, answer):
    with pytest.raises(ConfigError, match=answer):
        trials(["unet"], ways=ways, modes=modes)


@pytest.mark.parametrize("way", [way for way in WAYS.values() if way.policy], ids=lambda w: w.name)
def test_the_policies_of_ours_are_policies(way):
    assert policy_from(way.policy).params == ("fp32" if way.name == BF16 else "bf16")
    assert ("e4m3" in str(policy_from(way.policy))) == (way.name == FP8_SPLIT)


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, lambda model, x: model(x).square().mean(), torch.linspace(-1, 1, 12).view(3, 4)


def test_without_a_gpu_the_make_step_torch_is_the_plain_one():
    trial = ZooTrial(model="m:b", way=AMP, mode="eager")
    step, _ = make_step(as_built(small(), CPU), trial, CPU)
    model, loss_fn, x = small()
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(3):
        loss = loss_fn(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(), loss.detach())


def test_torchao_needs_a_gpu():
    trial = ZooTrial(model="m:b", way=TORCHAO, mode="compiled")
    with pytest.raises(UnsupportedError, match="need a GPU"):
        make_step(as_built(small(), CPU), trial, CPU)
