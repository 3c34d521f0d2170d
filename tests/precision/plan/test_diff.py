"""Another policy in the middle of a run: what is converted, what goes on, what begins anew."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.plan.plan import PrecisionChange, make_plan
from narrowcast.precision.swap import is_swapped

pytestmark = pytest.mark.usefixtures("guarded")
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
EXACT = ["fp32", "bf16", "fp8-delayed", "aggressive", "bf16, params=bf16, master=fp32"]
"""Policies that keep every bit of an fp32 weight."""
OTHERS = [
    "bf16, params=bf16, master=kahan", "bf16, params=bf16, master=stochastic", "bf16-pure",
    "fp16, params=fp16, master=kahan", "fp16, params=fp16, master=fp32",
]  # fmt: skip


def model_of(width=32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 32),
        nn.Linear(32, 4),
    )  # fmt: skip


def fresh(policy, cpu, *, optimizer="adamw", model=None, **given_settings):
    model = model or model_of()
    match optimizer:
        case "adamw":
            made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        case "sgd":
            made = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scheduler = LambdaLR(made, lambda step: 0.9**step)
    return nc.prepare(
        model,
        made,
        policy=make_plan(model, policy, hardware=cpu),
        scheduler=scheduler,
        **{"clip_norm": 0.5, **given_settings},
    )


def planned(run, policy):
    return make_plan(run.model, policy, hardware=run.plan.hardware)


def train(run, first, last, *, accumulate=1, overflow_at=()):
    told = []
    for step in range(first, last):
        for part in range(accumulate):
            factor = math.inf if step in overflow_at else 1.0 + 0.1 * step + part
            with run.autocast():
                loss = F.mse_loss(run.model(X * factor), torch.zeros(8, 4))
            run.backward(loss / accumulate)
        outcome = run.step()
        told.append((outcome.applied, outcome.grad_norm, outcome.lr))
    return told


def fp32_values(run):
    return {name: value.clone() for name, value in run.fp32_state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moments(run):
    groups = run.optimizer.param_groups
    states = [run.optimizer.state[p] for group in groups for p in group["params"]]
    return [
        value.float().clone()
        for state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    ]


@pytest.mark.pairwise
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("through", EXACT)
@pytest.mark.parametrize("policy", EXACT)
def test_weights_and_moments_pass_through_another_policy_bit_for_bit(
    policy, through, optimizer, cpu
):
    run = fresh(policy, cpu, optimizer=optimizer)
    train(run, 0, 3)
    weights, kept = fp32_values(run), moments(run)
    for there in (through, policy):
        run.set_policy(planned(run, there))
        assert equal(fp32_values(run), weights)
        assert all(map(torch.equal, moments(run), kept))


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("through", [*EXACT, *OTHERS])
@pytest.mark.parametrize("policy", OTHERS[:4])
def test_what_a_narrow_kind_holds_is_handed_on_whole(policy, through, cpu):
    run = fresh(policy, cpu)
    train(run, 0, 3)
    held = fp32_values(run)
    run.set_policy(planned(run, "fp32"))
    assert equal(fp32_values(run), held)
    run.set_policy(planned(run, policy))
    assert equal(fp32_values(run), held)
    run.set_policy(planned(run, through))
    assert train(run, 3, 5)[-1][0]


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=50)
@given(values=st.lists(numbers.filter(lambda v: abs(v) < 3.3e38), min_size=4, max_size=4))
def test_any_fp32_weight_survives_a_split_and_a_master_copy(values):
    """But those whose bf16 is zero: a split weight that is zero is zero in all its digits."""
    values = [v if abs(v) >= 2.0**-134 else v * 0 for v in values]
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor(values).view(2, 2)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    for policy in ("aggressive", "bf16, params=bf16, master=fp32", "aggressive", "fp32"):
        run.set_policy(planned(run, policy))
        kept = run.fp32_state_dict()["weight"].view(torch.int32)
        assert torch.equal(kept, torch.tensor(values).view(2, 2).view(torch.int32))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("fused_optimizer", [None, True])
def test_a_switch_there_and_back_leaves_an_fp32_run_what_it_was(
    fused_optimizer, optimizer, accumulate, cpu
):
    if fused_optimizer and optimizer == "sgd":
        pytest.skip("the fused kernel is for Adam")
    settings = {"optimizer": optimizer, "fused_optimizer": fused_optimizer, "ema_decay": 0.9}
    plain, switched = fresh("fp32", cpu, **settings), fresh("fp32", cpu, **settings)
    rest = train(plain, 0, 6, accumulate=accumulate)
    told = train(switched, 0, 3, accumulate=accumulate)
    for policy in ("aggressive", "bf16, params=bf16, master=fp32", "fp8-delayed", "fp32"):
        switched.set_policy(planned(switched, policy))
    told += train(switched, 3, 6, accumulate=accumulate)
    assert told == rest
    assert equal(fp32_values(switched), fp32_values(plain))
    with plain.use_ema(), switched.use_ema():
        assert equal(switched.model.state_dict(), plain.model.state_dict())


def test_training_through_a_switch_of_fp32_is_the_plain_loop_of_torch(cpu):
    model, steps = model_of(), 6
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    for step in range(steps):
        loss = F.mse_loss(model(X * (1.0 + 0.1 * step)), torch.zeros(8, 4))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    run = fresh("fp32", cpu)
    train(run, 0, 3)
    run.set_policy(planned(run, "conservative"))
    train(run, 3, steps)
    assert equal(fp32_values(run), dict(model.state_dict()))


@pytest.mark.parametrize("fused_optimizer", [None, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("policy", ["aggressive", "bf16, params=bf16, master=fp32"])
def test_a_switch_at_the_very_beginning_is_the_policy_itself(
    policy, optimizer, fused_optimizer, cpu
):
    if fused_optimizer and optimizer == "sgd":
        pytest.skip("the fused kernel is for Adam")
    settings = {"optimizer": optimizer, "fused_optimizer": fused_optimizer}
    direct, switched = fresh(policy, cpu, **settings), fresh("fp32", cpu, **settings)
    switched.set_policy(planned(switched, policy))
    assert train(direct, 0, 4) == train(switched, 0, 4)
    assert equal(fp32_values(direct), fp32_values(switched))


@pytest.mark.parametrize("policy", ["aggressive", "bf16-pure", "fp8-delayed"])
@pytest.mark.parametrize("name", ["RMSprop", "Adafactor", "NAdam", "Adagrad"])
def test_any_optimizer_goes_on_in_another_policy_and_back(name, policy, cpu):
    model = model_of()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    run = nc.prepare(model, optimizer, policy=make_plan(model, "fp32", hardware=cpu))
    train(run, 0, 2)
    for there in (policy, "fp32"):
        run.set_policy(planned(run, there))
        assert all(applied for applied, *_ in train(run, 2, 4))
    assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}


def test_gradients_have_the_format_of_the_policy_in_force(cpu):
    run = fresh("bf16, params=bf16, master=split, grads=fp32", cpu)
    seen = []
    for policy in ("bf16, params=bf16, master=split", "fp32", "bf16, params=bf16, master=split"):
        run.set_policy(planned(run, policy))
        with run.autocast():
            loss = F.mse_loss(run.model(X), torch.zeros(8, 4))
        run.backward(loss)
        seen.append(run.model[3].weight.grad.dtype)
        run.step()
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("policy", ["aggressive, moments=int8", "bf16-pure, moments=int8"])
def test_eight_bit_moments_that_stay_so_keep_their_codes(policy, cpu):
    run = fresh("fp32, moments=int8", cpu)
    train(run, 0, 3)
    kept = moments(run)
    run.set_policy(planned(run, policy))
    assert all(map(torch.equal, moments(run), kept))
    assert run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]["exp_avg"].dtype == (
        torch.int8
    )
    assert train(run, 3, 5)[-1][0]


def test_moments_take_the_formats_of_the_new_policy(cpu):
    run = fresh("fp32, moments=int8", cpu)
    train(run, 0, 3)
    codes = moments(run)[0]
    run.set_policy(planned(run, "fp32"))
    states = [run.optimizer.state[p] for p in run.optimizer.param_groups[0]["params"]]
    assert {key for state in states for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    kept = states[0]["exp_avg"]
    assert kept.dtype == torch.float32
    assert torch.equal(kept.sign(), codes.sign())
    assert "torch.optim.AdamW" in run.update_path


def test_a_loss_scale_goes_on_where_both_need_one_and_begins_anew_where_one_does(cpu):
    scale = nc.LossScale(init_scale=1024.0)
    run = fresh("fp16", cpu, loss_scale=scale)
    train(run, 0, 2, overflow_at=(1,))
    value = run.state_dict()["scales"]["losses"]["loss"]
    assert value["value"] == 512.0
    run.set_policy(planned(run, "fp16, params=fp16, master=fp32"))
    assert run.state_dict()["scales"]["losses"]["loss"] == value
    run.set_policy(planned(run, "bf16"))
    assert run.state_dict()["scales"]["losses"] == {}
    run.set_policy(planned(run, "fp16"))
    assert run.state_dict()["scales"]["losses"]["loss"]["value"] == 1024.0
    run.set_policy(planned(run, "bf16"))
    run.set_policy(planned(run, "fp16"), loss_scale=nc.LossScale(init_scale=64.0))
    assert run.state_dict()["scales"]["losses"]["loss"]["value"] == 64.0


def test_a_policy_that_needs_a_scale_is_given_the_default_one(cpu):
    run = fresh("bf16", cpu)
    run.set_policy(planned(run, "fp16"))
    assert run.state_dict()["scales"]["losses"]["loss"]["value"] == 2.0**16
    assert train(run, 0, 1)[0][0]


def test_histories_go_on_by_name_and_new_ones_begin_empty(cpu):
    run = fresh("fp8-delayed; 4: bf16", cpu)
    train(run, 0, 3)
    before = run.model[3].nc_history
    amax, inverse = before.amax.clone(), before.scale_inv("weight").clone()
    assert amax.any()
    run.set_policy(planned(run, "fp8-delayed; 0: bf16"))
    after = run.model[3].nc_history
    assert after is not before
    assert torch.equal(after.amax, amax)
    assert torch.equal(after.scale_inv("weight"), inverse)
    run.set_policy(planned(run, "fp8-delayed, grad_input=e4m3, grad_weight=e4m3; 3: bf16"))
    assert not run.model[0].nc_history.amax.any()


def test_a_first_step_that_is_skipped_decides_no_scale_after_a_change(cpu):
    run = fresh("bf16", cpu)
    train(run, 0, 2)
    run.set_policy(planned(run, "fp8-delayed"))
    train(run, 2, 3, overflow_at=(2,))
    clean = fresh("bf16", cpu)
    train(clean, 0, 2)
    clean.set_policy(planned(clean, "fp8-delayed"))
    told, expected = train(run, 3, 5), train(clean, 3, 5)
    assert [norm for _, norm, _ in told] == [norm for _, norm, _ in expected]


def test_a_first_step_that_is_skipped_after_a_change_decides_nothing_for_a_resumed_run(cpu):
    straight = fresh("bf16", cpu)
    train(straight, 0, 2)
    straight.set_policy(planned(straight, "fp8-delayed"))
    train(straight, 2, 3, overflow_at=(2,))
    saved = copy.deepcopy(straight.state_dict())
    resumed = fresh("bf16", cpu)
    resumed.set_policy(planned(resumed, "fp8-delayed"))
    resumed.load_state_dict(saved)
    assert train(resumed, 3, 5) == train(straight, 3, 5)


def test_a_skipped_step_after_a_change_leaves_older_histories_alone(cpu):
    run = fresh("fp8-delayed; 0: bf16", cpu)
    train(run, 0, 3)
    run.set_policy(planned(run, "fp8-delayed"))
    scale = run.model[3].nc_history.scale_inv("input").clone()
    train(run, 3, 4, overflow_at=(3,))
    with run.autocast():
        assert torch.equal(run.model[3].nc_history.scale_inv("input"), scale)
        assert not run.model[0].nc_history.scale_inv("input").any()


def test_chance_is_drawn_anew_where_rounding_by_chance_begins(cpu):
    run = fresh("fp32", cpu)
    train(run, 0, 3)
    run.set_policy(planned(run, "bf16, params=bf16, master=stochastic"))
    master = run.state_dict()["master"]
    assert (master["seed"], master["rounds"]) == (3, 0)


def test_the_optimizer_its_rates_and_all_counts_go_on(cpu):
    run = fresh("fp16", cpu, ema_decay=0.5)
    optimizer = run.optimizer
    train(run, 0, 3, overflow_at=(1,))
    stats, lr = copy.deepcopy(run.stats()), optimizer.param_groups[0]["lr"]
    average = [a.clone() for a in run.state_dict()["average"]]
    run.set_policy(planned(run, "aggressive"))
    assert run.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == lr
    assert (run.stats().steps, run.stats().skipped) == (stats.steps, stats.skipped) == (3, 1)
    assert all(map(torch.equal, run.state_dict()["average"], average))


def test_only_the_modules_that_change_are_told_and_no_weight_is_touched(cpu):
    run = fresh("fp8-delayed", cpu)
    train(run, 0, 2)
    places = [p.data_ptr() for p in run.model.parameters()]
    exception = make_plan(run.model, "fp8-delayed", hardware=cpu, overrides={"3": "bf16"})
    assert run.set_policy(exception) == [
        PrecisionChange(module="3", before="e4m3/e5m2 delayed", after="bf16")
    ]
    assert [p.data_ptr() for p in run.model.parameters()] == places
    assert run.set_policy(planned(run, "fp8-delayed")) == [
        PrecisionChange(module="3", before="bf16", after="e4m3/e5m2 delayed")
    ]
    assert run.set_policy(planned(run, "fp8-delayed")) == []


def test_a_change_of_the_whole_model_says_what_becomes_of_weights(cpu):
    run = fresh("fp32", cpu)
    told = {each.module: each for each in run.set_policy(planned(run, "aggressive"))}
    assert told["0"].before == "fp32"
    assert told["0"].after == "e4m3/e5m2 tensor, weights bf16 with split master"
    assert "1" not in told  # a batch norm stays in fp32


def test_a_prepared_model_is_planned_as_the_one_it_was(cpu):
    plain = make_plan(model_of(), "fp8-tensor; 4: fp32", hardware=cpu)
    run = fresh("aggressive; 4: bf16", cpu)
    assert planned(run, "fp8-tensor; 4: fp32") == plain


def test_buffers_are_still_guarded_after_a_change(cpu):
    run = fresh("fp32", cpu)
    train(run, 0, 2)
    run.set_policy(planned(run, "aggressive"))
    mean = run.model[1].running_mean.clone()
    assert not train(run, 2, 3, overflow_at=(2,))[0][0]
    assert torch.equal(run.model[1].running_mean, mean)


def test_a_released_model_is_plain_again_after_changes(cpu):
    run = fresh("fp32", cpu)
    train(run, 0, 2)
    run.set_policy(planned(run, "aggressive"))
    weights = fp32_values(run)
    model = run.release()
    assert not is_swapped(model)
    assert equal(dict(model.state_dict()), weights)


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("policy", ["fp8-delayed", "aggressive", "fp16", *OTHERS])
def test_a_state_goes_on_in_objects_brought_into_its_policy(policy, ema_decay, cpu, same_state):
    settings = {"ema_decay": ema_decay}
    straight = fresh("fp32", cpu, **settings)
    train(straight, 0, 2)
    straight.set_policy(planned(straight, policy))
    train(straight, 2, 4)
    saved = copy.deepcopy(straight.state_dict())
    resumed = fresh("fp32", cpu, **settings)
    resumed.set_policy(planned(resumed, policy))
    resumed.load_state_dict(saved)
    assert train(resumed, 4, 6) == train(straight, 4, 6)
    assert same_state(resumed.state_dict(), straight.state_dict())


def test_a_change_between_backward_and_step_is_refused(cpu):
    run = fresh("fp32", cpu)
    with run.autocast():
        run.backward(run.model(X).sum())
    with pytest.raises(ConfigError, match="Call it after step"):
        run.set_policy(planned(run, "bf16"))


def test_a_plan_of_another_model_is_refused_and_changes_nothing(cpu):
    run = fresh("bf16", cpu)
    other = make_plan(nn.ModuleDict({"one": nn.Linear(4, 4)}), "fp32", hardware=cpu)
    with pytest.raises(ConfigError, match="no module 'one'"):
        run.set_policy(other)
    assert is_swapped(run.model)


def test_what_the_update_cannot_do_is_refused_and_changes_nothing(cpu):
    run = fresh("bf16", cpu, optimizer="sgd")
    before = run.plan
    with pytest.raises(UnsupportedError, match="moments=int8 needs the fused optimizer"):
        run.set_policy(planned(run, "bf16, moments=int8"))
    assert run.plan is before


def test_parts_with_scales_of_their_own_are_refused_where_no_scale_is(cpu):
    run = fresh("fp16", cpu, scale_groups=["3"])
    train(run, 0, 1)
    with pytest.raises(ConfigError, match="needs a single loss scale"):
        run.set_policy(planned(run, "bf16"))
    run.set_policy(planned(run, "fp16; 0: fp32"))
    assert train(run, 1, 2)[0][0]
