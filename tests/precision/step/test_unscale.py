"""Gradients that the user clips and edits under a loss scale, against torch's own scaler."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import ConfigError, DivergedError

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
STEPS = 30
BAD = {3, 4, 11, 12, 13, 25}
GROWTH = 4


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def optimizer_of(model, kind=torch.optim.SGD):
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return kind(model.parameters(), lr=0.05, **settings)


def scale(**settings):
    return nc.LossScale(
        **{
            "init_scale": 2.0**10,
            "growth_interval": GROWTH,
            "min_scale": 2.0**-20,
            "max_scale": 2.0**30,
            **settings,
        }
    )


def prepared(model, *, policy="fp32", kind=torch.optim.SGD, **settings):
    settings = {"loss_scale": scale(), **settings}
    return nc.prepare(model, optimizer_of(model, kind), policy=policy, **settings)


def loss_of(model, step):
    loss = model(X * (1 + step / 10)).square().mean()
    return loss * math.inf if step in BAD else loss


def noise(parameters):
    generator = torch.Generator().manual_seed(2)
    for p in parameters:
        p.grad.add_(torch.randn(p.shape, generator=generator) * 1e-3)


def layer_by_layer(parameters):
    for p in parameters:
        p.grad = p.grad / (p.grad.norm() + 1e-6) * p.detach().norm()


EDITS = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_(p, 0.01),
    "noise": noise,
    "layer by layer": layer_by_layer,
    "hiding what is bad": lambda p: [each.grad.nan_to_num_(0.0, 0.0, 0.0) for each in p],
    "nothing": lambda p: None,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_edited_gradients_train_as_with_torchs_scaler_bit_for_bit(edit, kind):
    plain, model = net(), net()
    optimizer, run = optimizer_of(plain, kind), prepared(model, kind=kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=GROWTH)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(plain, step)).backward()
        scaler.unscale_(optimizer)
        edit(list(plain.parameters()))
        scaler.step(optimizer)
        scaler.update()
        with run.autocast():
            loss = loss_of(model, step)
        run.backward(loss)
        run.unscale()
        edit(list(model.parameters()))
        outcome = run.step()
        assert outcome.applied is (step not in BAD)
        assert outcome.next_scale == scaler.get_scale()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "fp32, params=bf16, master=split, grads=fp32"])
def test_unscaling_early_without_an_edit_changes_no_bit(policy, fused):
    def trained(*, early):
        model = net()
        run = prepared(
            model, policy=policy, kind=torch.optim.AdamW, fused_optimizer=fused, clip_norm=0.05
        )
        seen = []
        for step in range(STEPS):
            with run.autocast():
                loss = loss_of(model, step).float()
            run.backward(loss / 2, retain_graph=True)
            run.backward(loss / 2)
            if early:
                run.unscale()
                run.unscale()
            outcome = run.step()
            seen.append(
                (outcome.applied, outcome.grad_norm, outcome.loss_scale, outcome.skip_reason)
            )
        return run.fp32_state_dict(), seen

    (plain, plain_seen), (weights, seen) = trained(early=False), trained(early=True)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert repr(seen) == repr(plain_seen)


def test_gradients_are_the_true_ones_after_unscale_and_the_norm_is_of_those_at_the_step():
    plain, run = net(), prepared(net())
    loss_of(plain, 0).backward()
    run.backward(loss_of(run.model, 0))
    run.unscale()
    for mine, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        mine.grad.mul_(0.5)
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    assert run.step().grad_norm == norm / 2


def test_a_part_with_a_scale_of_its_own_is_unscaled_by_both_and_is_the_one_to_give_way():
    plain, model = net(), net()
    run = prepared(model, scale_groups=["2"])
    run.engine.scales.parts["2"].value.fill_(8.0)
    loss_of(plain, 0).backward()
    run.backward(loss_of(model, 0))
    assert torch.equal(model[2].weight.grad, plain[2].weight.grad * 2.0**10 * 8)
    run.unscale()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    run.step()
    run.backward(loss_of(model, 0))
    model[2].weight.grad.data.fill_(math.inf)  # uncounted: as if it had overflowed there
    run.unscale()
    for p in model.parameters():
        p.grad.zero_()
    outcome = run.step()
    assert outcome.bad_parameters == ("2.weight",)
    assert [v.item() for v in run.engine.scale_values()] == [2.0**10, 4.0]


def test_losses_with_scales_of_their_own_move_their_own_scales():
    model = net()
    run = prepared(model, loss_scale={"a": scale(), "b": scale()})
    output = model(X)
    run.backward(output.square().mean(), name="a", retain_graph=True)
    run.backward(output.sum() * math.inf, name="b")
    run.unscale()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not run.step().applied
    assert [v.item() for v in run.engine.scale_values()] == [2.0**10, 2.0**9]


def test_an_edit_that_is_not_finite_skips_the_step_and_moves_no_scale():
    model = net()
    run = prepared(model, max_skipped_steps=3, loss_scale=scale(growth_interval=100))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        run.backward(loss_of(model, 0))
        run.unscale()
        model[0].bias.grad.fill_(math.nan)
        outcome = run.step()
        assert not outcome.applied
        assert outcome.bad_parameters == ("0.bias",)
        assert outcome.next_scale == outcome.loss_scale
    assert all(map(torch.equal, model.parameters(), before))
    run.backward(loss_of(model, 0))
    # No scale could give way to it: it must not go on for ever.
    with pytest.raises(DivergedError, match="3 steps in a row"):
        run.step()


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_without_a_scale_gradients_are_true_and_unscale_does_nothing(policy):
    model = net()
    run = prepared(model, policy=policy, loss_scale=None)
    run.unscale()
    run.backward(loss_of(model, 0).float())
    gradients = [p.grad.clone() for p in model.parameters()]
    run.unscale()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    run.backward(loss_of(model, 0).float())
    assert run.step().applied


def test_another_backward_after_unscale_is_refused_until_the_step_or_zero_grad():
    model = net()
    run = prepared(model)
    for clear in (run.step, run.zero_grad, model.zero_grad):
        run.backward(loss_of(model, 0))
        run.unscale()
        with pytest.raises(ConfigError, match=r"every backward\(\) of a step first, then unscale"):
            run.backward(loss_of(model, 0))
        clear()
    assert run.step(loss_of(model, 0)).applied


def test_unscale_without_gradients_is_refused():
    run = prepared(net())
    with pytest.raises(ConfigError, match=r"unscale\(\) has no gradients to use\. Call backward"):
        run.unscale()


def test_gradients_kept_in_fp16_are_refused_with_what_to_write():
    model = net()
    for policy in ("fp16, params=fp16", "fp16, params=fp16, grads=fp32"):
        run = prepared(model, policy=policy)
        with run.autocast():
            loss = model(X).float().square().mean()
        run.backward(loss)
        if "grads" in policy:
            run.unscale()
            assert run.step().applied
            continue
        with pytest.raises(ConfigError, match="Write grads=fp32 in the policy"):
            run.unscale()
        assert run.step().applied
        run.release()


class Reads(TorchDispatchMode):
    """Counts how often a tensor is read on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.item,
            torch.ops.aten.is_nonzero,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("groups", [(), ("2",)], ids=["one scale", "a part"])
def test_unscale_reads_nothing_on_the_host(groups):
    run = prepared(net(), scale_groups=groups)
    run.backward(loss_of(run.model, 0))
    with Reads() as reads:
        run.unscale()
    assert reads.count == 0


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_that_no_step_used_are_given_back_without_a_scale(unscaled):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp16")
    with run.autocast():
        loss = model(x).float().square().mean()
    run.backward(loss)
    if unscaled:
        run.unscale()
    run.release()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert (p.grad - grad).abs().max() <= 0.01 * grad.abs().max()


@pytest.mark.parametrize("edited", [False, True])
def test_gradients_that_have_no_scale_are_given_back_as_they_are(edited):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp16")
    if edited:
        run.backward(model(x).float().square().mean())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    else:
        model(x).float().square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    run.release()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)
