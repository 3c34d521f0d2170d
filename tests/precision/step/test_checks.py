"""What `prepare` and `change` are given by mistake, and what they say to write instead."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("which", ["itself", "a submodule", "a parent", "with the same optimizer"])
def test_a_model_or_part_of_one_that_is_prepared_is_refused_until_released(mlp, policy, which):
    model = mlp()
    other = {"a submodule": model[0], "a parent": nn.Sequential(model)}.get(which, model)
    optimizer = adamw(model)
    run = nc.prepare(model, optimizer, policy=policy)
    second = optimizer if which == "with the same optimizer" else adamw(other)
    with pytest.raises(ConfigError, match=r"is already prepared\. .*[Cc]all release\(\)"):
        nc.prepare(other, second, policy=policy)
    run.release()
    nc.prepare(other, second, policy=policy)


def test_a_model_whose_run_nobody_holds_any_more_still_has_its_optimizer(mlp):
    model = mlp()
    optimizer = adamw(model)
    nc.prepare(model, optimizer, policy="fp32")
    with pytest.raises(ConfigError, match="This optimizer is already prepared"):
        nc.prepare(model, optimizer, policy="fp32")


def test_a_model_is_prepared_again_after_a_change_and_a_release(mlp):
    model = mlp()
    run = nc.prepare(model, adamw(model), policy="fp32")
    run.set_policy("bf16, params=bf16, master=split")
    with pytest.raises(ConfigError, match="already prepared"):
        nc.prepare(model, adamw(model), policy="fp32")
    run.release()
    nc.prepare(model, adamw(model), policy="fp32")


def test_models_may_share_an_activation_and_be_prepared_each(mlp):
    act = nn.ReLU()
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), act)
        run = nc.prepare(model, adamw(model), policy="fp32")
        run.step(model(torch.ones(2, 4)).sum())


@pytest.mark.parametrize("what", ["module", "weight"])
def test_two_runs_that_would_train_the_same_weights_are_refused(what):
    one, other = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    if what == "module":
        other[0] = one[0]
    else:
        other[0].weight = one[0].weight
    first = nc.prepare(one, adamw(one), policy="fp32")
    with pytest.raises(ConfigError, match=r"as one nn\.ModuleList"):
        nc.prepare(other, adamw(other), policy="fp32")
    first.release()
    both = nn.ModuleList([one, other])
    run = nc.prepare(both, adamw(both), policy="fp32")
    run.step(sum(m(torch.ones(2, 3)).sum() for m in both))


def test_an_optimizer_of_another_model_is_refused_with_both_sides_named(mlp):
    model = mlp()
    optimizer = adamw(copy.deepcopy(model)[3:])
    message = (
        r"share no parameters, got 2 in the optimizer \(the first of shape \(16, 32\)\) and 6 "
    )
    with pytest.raises(
        ConfigError, match=message + r"in the model \(0\.weight of shape \(32, 32\)"
    ):
        nc.prepare(model, optimizer, policy="fp32")


def test_a_weight_of_the_users_own_is_trained_with_the_model(mlp):
    model, temperature = mlp(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
    run = nc.prepare(model, optimizer, policy="bf16")
    with run.autocast():
        loss = (model(torch.ones(2, 32)).float() * temperature).square().mean()
    assert run.step(loss).applied
    assert temperature != 1


def test_arguments_that_changed_places_are_told(mlp):
    model = mlp()
    with pytest.raises(ConfigError, match=r"Write prepare\(model, optimizer\)"):
        nc.prepare(adamw(model), model)


def test_parameters_in_place_of_an_optimizer_are_told(mlp):
    model = mlp()
    with pytest.raises(
        ConfigError,
        match=r"must be a torch\.optim\.Optimizer, got generator\. .*AdamW\(model\.param",
    ):
        nc.prepare(model, model.parameters())


def test_something_in_place_of_a_model_is_told(mlp):
    with pytest.raises(ConfigError, match=r"must be an nn\.Module, got function"):
        nc.prepare(lambda x: x, adamw(mlp()))


DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_of_torch_stands_for_its_preset(mlp, dtype):
    model = mlp()
    run = nc.prepare(model, adamw(model), policy=dtype)
    assert run.plan.policy == nc.PRESETS[DTYPES[dtype]]
    assert nc.policy(dtype) == nc.PRESETS[DTYPES[dtype]]


NO_POLICIES = {
    "None": (None, r"got None. Write a preset name \(fp32, .*or leave it out"),
    "a dict": (
        {"compute": "bf16", "params": "bf16"},
        r'Write its roles as text: policy="compute=bf16, params=bf16"',
    ),
    "fp64": (torch.float64, r"torch\.float64 matches no preset\. Write torch\.bfloat16"),
    "a number": (16, "got 16. Write a preset name"),
}


@pytest.mark.parametrize(("policy", "message"), NO_POLICIES.values(), ids=NO_POLICIES)
def test_what_is_no_policy_is_refused_with_what_to_write(mlp, policy, message):
    model = mlp()
    with pytest.raises(ConfigError, match=message):
        nc.prepare(model, adamw(model), policy=policy)
    run = nc.prepare(model, adamw(model), policy="fp32")  # nothing was changed
    with pytest.raises(ConfigError, match=message):
        run.set_policy(policy)


@pytest.mark.parametrize("policy", ["bf16", nc.policy("bf16"), torch.bfloat16])
def test_change_takes_a_policy_as_prepare_does(mlp, policy):
    model = mlp()
    run = nc.prepare(model, adamw(model), policy="fp32")
    changed = run.set_policy(policy)
    assert run.plan == nc.plan(model, "bf16", hardware=run.plan.hardware)
    assert {change.module for change in changed} == {"0", "3"}


def test_change_emulates_where_prepare_was_told_to(mlp):
    model = mlp()
    run = nc.prepare(model, adamw(model), policy="fp32", emulate=False)
    native = run.plan.hardware.support("bf16").how == "native"
    if native:
        run.set_policy("bf16")
        assert not run.plan.emulated
        return
    with pytest.raises((ConfigError, UnsupportedError), match="emulate"):
        run.set_policy("bf16")


@pytest.mark.parametrize("scale", [1024.0, 1024, {"loss": 1024.0}])
def test_a_number_is_the_loss_scale_to_begin_with(mlp, scale):
    model = mlp()
    run = nc.prepare(model, adamw(model), policy="fp16", loss_scale=scale)
    assert run.loss_scale == nc.LossScale(init_scale=1024.0)
    run.set_policy("fp32")
    run.set_policy("fp16", loss_scale=64.0)
    assert run.loss_scale == nc.LossScale(init_scale=64.0)


NO_SCALES = {
    "a GradScaler": (
        torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7),
        r"remove the scaler .* calls, and write .*LossScale\(init_scale=512, growth_interval=7",
    ),
    "a GradScaler that does nothing": (
        torch.amp.GradScaler("cpu", enabled=False),
        r"remove the scaler .* calls; for another initial scale write loss_scale=1024\.0",
    ),
    "True": (True, "loss_scale must be a LossScale or a number, got bool"),
    "a text": ("dynamic", "loss_scale must be a LossScale or a number, got str"),
    "no names": ({}, "names no loss"),
    "zero": (0.0, "must be a positive number"),
}


@pytest.mark.parametrize(("scale", "message"), NO_SCALES.values(), ids=NO_SCALES)
def test_what_is_no_loss_scale_is_refused_with_what_to_write(mlp, scale, message):
    model = mlp()
    with pytest.raises(ConfigError, match=message):
        nc.prepare(model, adamw(model), policy="fp16", loss_scale=scale)


class Complex(nn.Module):
    """A spectral layer, its weight complex or as pairs of real numbers."""

    def __init__(self, *, real):
        super().__init__()
        self.real = real
        weight = torch.ones(4, dtype=torch.complex64)
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if real else weight)

    def forward(self, x):
        weight = torch.view_as_complex(self.weight) if self.real else self.weight
        return torch.fft.irfft(torch.fft.rfft(x) * weight, n=6)


def test_complex_weights_are_refused_with_advice_that_works():
    model = Complex(real=False)
    with pytest.raises(UnsupportedError, match=r"torch\.view_as_real\(…\).*torch\.view_as_complex"):
        nc.prepare(model, adamw(model), policy="fp32")
    model = Complex(real=True)
    run = nc.prepare(model, adamw(model), policy="bf16")
    with run.autocast():
        loss = model(torch.randn(3, 6)).square().mean()
    assert run.step(loss).applied


@pytest.mark.parametrize("wrong", [{"clip_norm": "1"}, {"clip_norm": True}, {"ema_decay": "0.9"}])
def test_settings_that_are_no_numbers_are_refused_by_name(wrong):
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be a number, got"):
        nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="bf16", **wrong)
