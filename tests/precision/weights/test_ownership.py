"""What a user does to model and optimizer after `prepare`: heeded, or refused; never ignored."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
MASTERS = ("fp32", "split", "kahan", "stochastic", "none")


def fresh(mlp, *, policy="fp32, params=bf16, master=split", fused_optimizer=True, **settings):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    return nc.prepare(model, optimizer, policy=policy, fused_optimizer=fused_optimizer)


def train(run, steps=2):
    for _ in range(steps):
        with run.autocast():
            loss = run.model(X).float().square().mean()
        run.step(loss)


@pytest.mark.pairwise
@pytest.mark.parametrize("fused_optimizer", [True, False])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.5, -3.0])
@pytest.mark.parametrize("master", MASTERS)
def test_weights_loaded_into_a_prepared_model_are_the_ones_it_goes_on_from(
    mlp, master, value, fused_optimizer
):
    run = fresh(mlp, policy=f"fp32, params=bf16, master={master}", fused_optimizer=fused_optimizer)
    train(run)
    state = {name: torch.full_like(w, value) for name, w in run.model.state_dict().items()}
    run.model.load_state_dict(state)
    for name, full in run.fp32_state_dict().items():
        # A part below half a spacing of bf16 may be left of what was there before.
        assert torch.allclose(full.float(), torch.tensor(value), rtol=2**-8, atol=1e-38), name
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    train(run, 1)
    assert all(torch.equal(w, state[name]) for name, w in run.model.state_dict().items())


@pytest.mark.parametrize("fused_optimizer", [True, False])
@pytest.mark.parametrize("master", MASTERS)
def test_weights_pruned_through_data_stay_pruned_in_every_digit(mlp, master, fused_optimizer):
    """As old code prunes, and torch does not count: low bits beside a zero were NaN once."""
    run = fresh(mlp, policy=f"fp32, params=bf16, master={master}", fused_optimizer=fused_optimizer)
    keep = {
        name: torch.rand(p.shape, generator=torch.Generator().manual_seed(i)) < 0.5
        for i, (name, p) in enumerate(run.model.named_parameters())
    }
    for _ in range(4):
        train(run, 1)
        for name, p in run.model.named_parameters():
            p.data.mul_(keep[name])
    for name, full in run.fp32_state_dict().items():
        assert (full[~keep[name]] == 0).all(), name
        assert (full[keep[name]] != 0).all(), name
        assert full.isfinite().all(), name


@pytest.mark.parametrize("master", ["fp32", "split", "kahan"])
def test_a_checkpoint_holds_no_digits_of_weights_that_were_written_over(mlp, master):
    run = fresh(mlp, policy=f"fp32, params=bf16, master={master}")
    train(run)
    for p in run.model.parameters():
        p.data.zero_()
    state = run.state_dict()
    assert all((kept == 0).all() for kept in state["master"]["residual"])
    other = fresh(mlp, policy=f"fp32, params=bf16, master={master}")
    other.load_state_dict(state)
    for each in (run, other):
        train(each)
    mine, theirs = run.fp32_state_dict(), other.fp32_state_dict()
    assert all(torch.equal(theirs[name], full) for name, full in mine.items())


@pytest.mark.parametrize("fused_optimizer", [True, False])
@pytest.mark.parametrize("master", MASTERS)
def test_what_is_written_through_data_trains_as_what_torch_counts(mlp, master, fused_optimizer):
    runs = [
        fresh(mlp, policy=f"fp32, params=bf16, master={master}", fused_optimizer=fused_optimizer)
        for _ in range(2)
    ]
    for run in runs:
        train(run)
    for hidden, counted in zip(*(run.model.parameters() for run in runs), strict=True):
        hidden.data.clamp_(-0.05, 0.05)
        with torch.no_grad():
            counted.clamp_(-0.05, 0.05)
    for run in runs:
        train(run)
    hidden, counted = (run.fp32_state_dict() for run in runs)
    assert all(torch.equal(hidden[name], counted[name]) for name in counted)


@pytest.mark.parametrize("master", ["fp32", "split", "kahan"])
def test_weights_lent_and_given_back_keep_every_digit(mlp, master):
    run = fresh(mlp, policy=f"fp32, params=bf16, master={master}")
    train(run)
    before = {name: full.clone() for name, full in run.fp32_state_dict().items()}
    kept = {name: w.clone() for name, w in run.model.state_dict().items()}
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(3)
    run.model.load_state_dict(kept)
    assert all(torch.equal(full, before[name]) for name, full in run.fp32_state_dict().items())


@pytest.mark.parametrize("master", ["fp32", "split", "kahan"])
def test_averaged_weights_never_become_the_master_weights(mlp, master):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = nc.prepare(model, optimizer, policy=f"fp32, params=bf16, master={master}", ema_decay=0.5)
    train(run, 3)
    before = {name: full.clone() for name, full in run.fp32_state_dict().items()}
    with run.use_ema():
        with run.use_ema():
            pass
        with torch.no_grad():
            next(model.parameters()).mul_(1)  # a write, inside the outer block still
    assert all(torch.equal(full, before[name]) for name, full in run.fp32_state_dict().items())


def test_a_model_laid_out_anew_after_prepare_is_refused():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 5))
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="fp32")
    model.to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match=r"strides \(36, 1, 12, 4\).*before prepare"):
        run.step(model(torch.randn(2, 4, 3, 3)).sum())


@pytest.mark.parametrize("cast", ["half", "float", "double"])
@pytest.mark.parametrize("fused_optimizer", [True, False])
def test_a_model_cast_after_prepare_is_refused(mlp, cast, fused_optimizer):
    run = fresh(mlp, fused_optimizer=fused_optimizer)
    train(run)
    with run.autocast():
        loss = run.model(X).float().square().mean()
    run.backward(loss)
    getattr(run.model, cast)()
    with pytest.raises(ConfigError, match=r"call model\.to\(…\) before prepare"):
        run.step()


def test_a_weight_replaced_in_the_optimizer_is_refused(mlp):
    run = fresh(mlp)
    train(run)
    run.optimizer.param_groups[0]["params"][-1] = nn.Parameter(torch.zeros(16))
    with pytest.raises(ConfigError, match="parameters changed after prepare"):
        train(run, 1)


def test_a_weight_moved_to_another_group_is_refused_rather_than_updated_as_before(mlp):
    model = mlp()
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.0}], lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp32", fused_optimizer=True)
    train(run)
    one, other = optimizer.param_groups
    one["params"].append(other["params"].pop())
    with pytest.raises(ConfigError, match="parameters changed after prepare"):
        train(run, 1)


@pytest.mark.parametrize("what", ["weight", "layer"])
def test_a_layer_replaced_in_the_model_is_refused_rather_than_not_trained(mlp, what):
    run = fresh(mlp)
    train(run)
    if what == "weight":
        run.model[3].weight = nn.Parameter(torch.zeros(16, 32))
    else:
        run.model[3] = nn.Linear(32, 16)
    with pytest.raises(ConfigError, match=r"3.* of the model was replaced after prepare"):
        train(run, 1)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16-pure", "fp32, params=bf16, master=fp32"])
def test_stepping_the_optimizer_by_hand_is_refused_until_release(mlp, policy):
    run = fresh(mlp, policy=policy, fused_optimizer=None)
    train(run)
    with pytest.raises(ConfigError, match=r"Call run\.step\(loss\)"):
        run.optimizer.step()
    run.release()
    run.model(X).square().mean().backward()
    before = run.model[0].weight.detach().clone()
    run.optimizer.step()
    assert not torch.equal(run.model[0].weight, before)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("master", MASTERS)
def test_gradients_cleared_through_the_optimizer_are_gone(mlp, master, set_to_none):
    run = fresh(mlp, policy=f"fp32, params=bf16, master={master}")
    with run.autocast():
        run.backward(run.model(X).float().square().mean())
    run.optimizer.zero_grad(set_to_none=set_to_none)
    left = [p.grad for p in run.model.parameters() if p.grad is not None]
    assert len(left) == (0 if set_to_none else 6)
    assert all(not grad.any() for grad in left)
    run.release()
    assert "zero_grad" not in vars(run.optimizer)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("maximize", True), ("amsgrad", True), ("betas", (torch.tensor(0.9), torch.tensor(0.99)))],
)
def test_settings_that_the_fused_step_lacks_are_refused_when_they_come_later(mlp, setting, value):
    run = fresh(mlp)
    train(run)
    run.optimizer.param_groups[0][setting] = value
    with pytest.raises(ConfigError, match="write fused_optimizer=False"):
        train(run, 1)


def test_gradients_that_no_loss_scale_is_in_are_refused_rather_than_divided_by_it(mlp):
    run = fresh(mlp, policy="fp16", fused_optimizer=None)
    with run.autocast():
        loss = run.model(X).float().square().mean()
    loss.backward()
    with pytest.raises(ConfigError, match=r"instead of loss\.backward\(\)"):
        run.step()


@pytest.mark.parametrize("master", ["fp32", "split", "kahan"])
@pytest.mark.parametrize("optimizer", ["fused", "foreach", "one pass"])
def test_a_model_laid_out_channels_last_trains_as_any_other(master, optimizer):
    def trained(memory_format):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        model = model.to(memory_format=memory_format)
        kind = {} if optimizer == "one pass" else {optimizer: True}
        run = nc.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.1, **kind),
            policy=f"fp32, params=bf16, master={master}",
            fused_optimizer=optimizer == "one pass",
        )
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            with run.autocast():
                loss = F.mse_loss(model(x).float(), torch.ones(2, 2))
            run.step(loss)
        return run.fp32_state_dict()["0.weight"]

    plain, last = trained(torch.contiguous_format), trained(torch.channels_last)
    # A kernel that takes elements in another order may round its last bit otherwise.
    assert torch.allclose(plain, last, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_of_what_prepare_returned_is_refused_with_what_to_save(mlp, how):
    run = fresh(mlp)
    with pytest.raises(UnsupportedError, match=r"Save run\.state_dict\(\)"):
        how(run)


@pytest.mark.parametrize("what", ["state_dict", "fp32_state_dict", "release", "step", "set_policy"])
def test_what_needs_the_trained_weights_is_refused_while_averages_stand_in(mlp, what):
    model = mlp()
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="fp32", ema_decay=0.5)
    train(run, 1)
    before = {name: full.clone() for name, full in run.fp32_state_dict().items()}
    calls = {
        "state_dict": run.state_dict,
        "fp32_state_dict": run.fp32_state_dict,
        "release": run.release,
        "step": lambda: run.step(model(X).sum()),
        "set_policy": lambda: run.set_policy(run.plan),
    }
    with (
        run.use_ema(),
        pytest.raises(ConfigError, match=rf"{what}\(\) was called inside use_ema"),
    ):
        calls[what]()
    assert all(torch.equal(full, before[name]) for name, full in run.fp32_state_dict().items())


def test_clearing_gradients_forgets_that_they_were_scaled(mlp):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = nc.prepare(model, optimizer, policy="fp32", loss_scale=nc.LossScale())
    run.backward(model(X).sum())
    optimizer.zero_grad()
    model(X).sum().backward()
    with pytest.raises(ConfigError, match="instead of loss"):
        run.step()


def test_gradients_are_cleared_in_place_where_torch_would(mlp):
    run = fresh(mlp)
    run.backward(run.model(X).sum())
    gradients = [p.grad for p in run.model.parameters()]
    run.optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
    assert not any(g.any() for g in gradients)


def test_nothing_keeps_a_prepared_model_alive_but_its_users(mlp):
    """Without waiting for Python to look for cycles: a GPU's memory would stay taken."""
    gc.collect()
    gc.disable()
    try:
        run = fresh(mlp)
        train(run, 1)
        weights = [weakref.ref(p) for p in run.model.parameters()]
        optimizer = weakref.ref(run.optimizer)
        del run
        assert optimizer() is None
        assert all(weight() is None for weight in weights)
    finally:
        gc.enable()


def test_release_leaves_what_a_user_has_put_in_place_of_zero_grad(mlp):
    run, called = fresh(mlp), []
    run.optimizer.zero_grad = lambda: called.append(1)
    run.release()
    run.optimizer.zero_grad()
    assert called == [1]


def test_an_optimizer_around_another_one_is_refused_before_anything_is_changed(mlp):
    class Around(torch.optim.Optimizer):
        def __init__(self, inside):
            self.optimizer = inside

        @property
        def param_groups(self):
            return self.optimizer.param_groups

    model = mlp()
    with pytest.raises(UnsupportedError, match="Pass the optimizer inside it"):
        nc.prepare(model, Around(torch.optim.AdamW(model.parameters())), policy="bf16")
    nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="fp32")


@pytest.mark.parametrize("what", ["step", "state_dict", "fp32_state_dict"])
def test_what_was_released_says_so(mlp, what):
    run = fresh(mlp)
    model = run.release()
    calls = {
        "step": lambda: run.step(model(X).sum()),
        "state_dict": run.state_dict,
        "fp32_state_dict": run.fp32_state_dict,
    }
    with pytest.raises(ConfigError, match="This run was released"):
        calls[what]()
