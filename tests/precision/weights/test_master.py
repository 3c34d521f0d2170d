import copy
import math

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.precision.weights.master import MasterWeights

KINDS = ("fp32", "split", "kahan", "stochastic", "none")


def masters(values, kind):
    parameter = nn.Parameter(values.bfloat16())
    return parameter, MasterWeights([parameter], [values], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_working_weight_begins_at_the_nearest_value(kind):
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    parameter, _ = masters(values, kind)
    assert torch.equal(parameter.detach(), values.bfloat16())


@pytest.mark.parametrize(("kind", "bits"), [("fp32", 24), ("split", 24), ("kahan", 16)])
def test_a_master_keeps_the_digits_it_promises(kind, bits):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    _, kept = masters(values, kind)
    error = (kept.full(0) - values).abs()
    assert (error <= 2.0**-bits * values.abs() * (kind == "kahan")).all()


@pytest.mark.parametrize("first", ["fp32", "split"])
@pytest.mark.parametrize("second", ["fp32", "split"])
def test_exact_masters_convert_into_each_other_without_loss(first, second):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    _, kept = masters(values, first)
    _, after = masters(kept.full(0), second)
    assert torch.equal(after.full(0), values)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_every_master_converts_into_every_other(first, second):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    _, kept = masters(values, first)
    before = kept.full(0)
    after = masters(before, second)[1].full(0)
    digits = {"fp32": 24, "split": 24, "kahan": 16, "stochastic": 8, "none": 8}[second]
    assert ((after - before).abs() <= 2.0**-digits * before.abs()).all()


# FIELD: weight 1.0, lr 1e-3, 100 steps of AdamW whose exact sum is 0.1.
def after_a_hundred_steps(kind, optimizer=torch.optim.AdamW):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4096))
    built = optimizer(model.parameters(), lr=1e-3, weight_decay=0.0)
    run = nc.prepare(model, built, policy=f"fp32, params=bf16, master={kind}")
    for _ in range(100):
        run.step((-model.weight.float()).sum())
    return model.weight.detach().float(), run


def test_without_a_master_every_small_update_is_lost():
    weight, run = after_a_hundred_steps("none")
    assert (weight == 1.0).all()
    assert run.stats().lost_updates == 1.0


@pytest.mark.parametrize("kind", ["fp32", "split", "kahan"])
def test_a_master_brings_the_weight_to_the_nearest_bf16(kind):
    weight, run = after_a_hundred_steps(kind)
    assert (weight == torch.tensor(1.1).bfloat16().float()).all()  # 1.1016
    assert run.stats().lost_updates == 0.0


def test_a_kahan_master_is_within_its_digits_of_the_sum():
    _, run = after_a_hundred_steps("kahan")
    # A hundred additions, each rounded to sixteen digits.
    assert (run.fp32_state_dict()["weight"] - 1.1).abs().max() < 100 * 2.0**-16


def test_stochastic_rounding_is_right_on_average():
    weight, _ = after_a_hundred_steps("stochastic")
    # Each of 4096 weights took 100 coins of 1/128 each: five standard deviations of their mean.
    deviation = math.sqrt(100 * 0.128 * 0.872) / 128 / math.sqrt(4096)
    assert abs(float(weight.mean()) - 1.1) < 5 * deviation


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.Adam]
)
def test_any_torch_optimizer_takes_a_master(optimizer):
    torch.manual_seed(0)
    model, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    plain.load_state_dict(model.state_dict())
    run = nc.prepare(
        model, optimizer(model.parameters(), lr=1e-2), policy="fp32, params=bf16, master=split"
    )
    theirs = optimizer(plain.parameters(), lr=1e-2)
    x = torch.randn(4, 8)
    for _ in range(5):
        with run.autocast():
            loss = model(x).square().mean()
        run.backward(loss)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.float()
        run.step()
        theirs.step()
    full = run.fp32_state_dict()
    assert all(torch.equal(full[name], p) for name, p in plain.named_parameters())


def test_weights_are_stepped_in_buckets_without_changing_the_result(monkeypatch):
    from narrowcast.precision.weights import master

    def trained():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split", clip_norm=0.1)
        for _ in range(3):
            with run.autocast():
                loss = model(torch.ones(2, 8)).square().mean()
            run.step(loss)
        return run.fp32_state_dict()

    whole = trained()
    monkeypatch.setattr(master, "BUCKET", 10)
    assert all(torch.equal(whole[name], value) for name, value in trained().items())


def test_fp16_weights_saturate_rather_than_become_infinite():
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((4,), 65000.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
    run = nc.prepare(
        model,
        optimizer,
        policy="fp32, params=fp16, master=fp32",
        loss_scale=nc.LossScale(init_scale=1.0),
    )
    run.step((-model.weight.float()).sum())
    assert (model.weight == 65504.0).all()


def test_gradients_too_small_for_fp16_reach_its_master_unscaled():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4))
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), policy="fp32, params=fp16, master=fp32"
    )
    run.step((model.weight.float() * 2.0**-30).sum())
    assert (run.fp32_state_dict()["weight"] == -(2.0**-30)).all()


@pytest.mark.parametrize("kind", ["fp32", "kahan"])
def test_a_weight_beyond_fp16_stays_finite_in_all_its_digits(kind):
    values = torch.tensor([7e4, -2e5, 1e30])
    parameter = nn.Parameter(values.clamp(-65504, 65504).half())
    kept = MasterWeights([parameter], [values], kind)
    assert parameter.isfinite().all()
    assert kept.full(0).isfinite().all()
    assert kept.full(0)[0] == 7e4


def test_a_checkpoint_of_another_kind_is_refused():
    values = torch.ones(3)
    _, kept = masters(values, "split")
    _, other = masters(values, "kahan")
    with pytest.raises(CheckpointError, match=r"has kahan master weights.*Write master=kahan"):
        kept.load_state_dict(other.state_dict())


@pytest.mark.parametrize("master", ["fp32", "split", "kahan", "stochastic"])
def test_an_optimizer_that_holds_master_weights_is_not_copied(master):
    """The copy would step weights that are no model's."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = nc.prepare(model, optimizer, policy=f"bf16, params=bf16, master={master}")
    with pytest.raises(UnsupportedError, match=r"before prepare\(\) or after release"):
        copy.deepcopy((model, optimizer))
    copy.deepcopy(optimizer.state_dict())
    copy.deepcopy(model)
    run.release()
    clone, copied = copy.deepcopy((model, optimizer))
    before = clone.weight.detach().clone()
    clone(torch.ones(1, 4)).sum().backward()
    copied.step()
    assert not torch.equal(clone.weight, before)


def test_a_weight_that_was_resized_is_told_of():
    model = nn.Embedding(8, 4)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="bf16, params=bf16")
    model.weight.data = torch.zeros(9, 4, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="Resize the model before"):
        run.fp32_state_dict()
    model(torch.tensor([3])).sum().backward()
    with pytest.raises(ConfigError, match=r"from 32 numbers .* to 36 numbers"):
        run.step()
