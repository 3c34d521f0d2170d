import contextlib
import copy
import itertools
import math
from operator import is_

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import ConfigError, DivergedError, UnsupportedError

pytestmark = pytest.mark.usefixtures("guarded")

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(1))
POLICIES = ["fp32", "tf32", "bf16", "fp16", "fp8-tensor", "bf16-pure", "aggressive"]


def loss_of(run, *, x=X, factor=1.0):
    with run.autocast():
        return F.cross_entropy(run.model(x), Y[: len(x)]) * factor


def prepared(model, *, lr=0.1, optimizer=torch.optim.SGD, policy="fp16", **settings):
    return nc.prepare(model, optimizer(model.parameters(), lr=lr), policy=policy, **settings)


def test_the_drop_in_of_the_design_works_as_written(mlp):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = [(X, Y)] * 8
    losses = []

    run = nc.prepare(model, optimizer, policy="fp16", clip_norm=1.0, scheduler=scheduler)
    for x, y in loader:
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        outcome = run.step(loss)
        losses.append((loss.item(), outcome.applied, outcome.skip_reason, outcome.loss_scale))

    assert all(applied and not why for _, applied, why, _ in losses)
    assert losses[-1][0] < losses[0][0]
    assert losses[0][3] == 65536
    assert scheduler.last_epoch == 8


OPTIMIZERS = [
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adafactor(p, lr=1e-2),
    lambda p: torch.optim.RMSprop(p, lr=1e-3),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
    lambda p: torch.optim.NAdam(p, lr=1e-2),
    lambda p: torch.optim.Adamax(p, lr=1e-2),
]


@pytest.mark.parametrize("policy", ["fp16", "bf16, params=bf16, master=split", "bf16-pure"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o([X])).__name__)
def test_any_torch_optimizer_trains_with_clipping_and_accumulation(mlp, optimizer, policy):
    model = mlp()
    run = nc.prepare(model, optimizer(model.parameters()), policy=policy, clip_norm=1.0)
    first = loss_of(run).item()
    for _ in range(10):
        for x, y in ((X[:4], Y[:4]), (X[4:], Y[4:])):
            with run.autocast():
                loss = F.cross_entropy(model(x), y) / 2
            run.backward(loss)
        run.step()
    assert run.stats().applied == 10
    assert loss_of(run).item() < first + 1e-3 * (policy == "bf16-pure")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fused", [True, False])
def test_nothing_moves_on_a_skipped_step(mlp, same_state, policy, fused):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    run = nc.prepare(model, optimizer, policy=policy, scheduler=scheduler, ema_decay=0.5)
    run.step(loss_of(run))
    before = copy.deepcopy(run.state_dict())
    lr = optimizer.param_groups[0]["lr"]
    outcome = run.step(loss_of(run, factor=math.inf))
    assert not outcome.applied
    after = run.state_dict()
    for part in ("weights", "master", "optimizer", "scheduler", "average"):
        assert same_state(after[part], before[part]), part
    assert optimizer.param_groups[0]["lr"] == lr
    assert (run.steps_attempted, run.steps_applied) == (2, 1)
    assert run.step(loss_of(run)).applied
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_skip_says_which_module_and_what_the_scale_did(mlp, policy):
    model = mlp()
    run = prepared(model, policy=policy)
    model[0].weight.register_hook(lambda g: g * math.nan)
    outcome = run.step(loss_of(run))
    assert "gradients of 1 of 6 weights are inf or NaN, nearest the loss: 0" in outcome.skip_reason
    assert ("loss scale 65536 → 32768" in outcome.skip_reason) is (policy == "fp16")


def test_the_module_nearest_the_loss_is_named_whatever_the_parameter_groups(mlp):
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{"params": vectors}, {"params": matrices[::-1]}], lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp32")
    assert run.step(loss_of(run, factor=math.nan)).skip_reason.endswith("nearest the loss: 3")


def test_no_module_is_to_be_overridden_where_every_gradient_is_bad(mlp):
    run = prepared(mlp(), policy="bf16")
    run.step(loss_of(run, factor=math.nan))
    (finding,) = run.findings()
    assert finding.advice == (
        "try a lower learning rate or a wider policy, or check the data; "
        "narrowcast.explain shows which value became bad first"
    )


def test_training_is_given_up_with_the_module_to_look_at(mlp):
    model = mlp()
    run = prepared(model, loss_scale=nc.LossScale(init_scale=4.0), max_skipped_steps=5)
    model[3].weight.register_hook(lambda g: g * math.inf)
    for _ in range(2 + 5):
        assert not run.step(loss_of(run)).applied
    with pytest.raises(
        DivergedError, match=r'last applied step. Look at 3: try policy="fp16; 3: fp32"'
    ):
        run.step(loss_of(run))
    assert DivergedError.exit_code == 4


def test_weights_that_something_else_has_spoilt_are_not_said_to_be_good(mlp):
    model = mlp()
    run = prepared(model, policy="bf16", max_skipped_steps=2)
    run.step(loss_of(run))
    with torch.no_grad():
        model[3].weight[0, 0] = math.nan
    for _ in range(2):
        assert not run.step(loss_of(run)).applied
    with pytest.raises(
        DivergedError, match=r"1 of 6 weights are inf or NaN too.*3\.weight\. Restore"
    ):
        run.step(loss_of(run))


def test_the_floor_is_a_finding_told_once(mlp):
    run = prepared(mlp(), loss_scale=nc.LossScale(init_scale=2.0))
    found = []
    for _ in range(6):
        run.step(loss_of(run, factor=math.inf))
        found.append(run.findings())
    assert [len(each) for each in found] == [0, 1, 0, 0, 0, 0]
    finding = found[1][0]
    assert (finding.step, finding.module) == (2, "3")
    assert "the scale is 1, its minimum" in finding.why
    assert finding.since == 1
    assert finding.advice.startswith("try a lower learning rate")


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp8-tensor", "bf16-pure"])
def test_a_policy_without_a_scale_gives_up_too(mlp, policy):
    run = prepared(mlp(), policy=policy, max_skipped_steps=3)
    for _ in range(3):
        run.step(loss_of(run, factor=math.nan))
    with pytest.raises(DivergedError, match="3 steps in a row"):
        run.step(loss_of(run, factor=math.nan))


def test_a_static_scale_that_can_only_overflow_gives_up(mlp):
    run = prepared(mlp(), loss_scale=nc.LossScale(dynamic=False), max_skipped_steps=3)
    for _ in range(3):
        run.step(loss_of(run, factor=math.nan))
    with pytest.raises(DivergedError, match="3 steps in a row"):
        run.step(loss_of(run))


def test_overflows_that_are_not_in_a_row_never_give_up(mlp):
    run = prepared(mlp(), policy="bf16", max_skipped_steps=2)
    for i in range(12):
        run.step(loss_of(run, factor=math.inf if i % 2 else 1.0))
    assert run.stats().skipped == 6


def test_statistics_are_those_of_the_run(mlp):
    run = prepared(mlp(), loss_scale=nc.LossScale(init_scale=1024.0, growth_interval=2))
    assert run.stats().current_scale == 1024
    norms = []
    for factor in (1.0, 1.0, math.inf, 1.0):
        outcome = run.step(loss_of(run, factor=factor))
        norms += [outcome.grad_norm] if outcome.applied else []
    stats = run.stats()
    assert (stats.scale_increases, stats.scale_decreases, stats.current_scale) == (1, 1, 1024)
    assert math.isclose(stats.average_grad_norm, sum(norms) / 3)
    assert (stats.steps, stats.skipped, stats.applied) == (4, 1, 3)
    assert stats.overflow_rate == 0.25
    assert stats.scale_history == [(1, 1024.0), (3, 2048.0), (4, 1024.0)]
    assert stats.grad_norm > 0


@pytest.mark.parametrize(
    ("policy", "params", "grads", "master", "moments"),
    [
        ("fp32", 4, 4, 0, 8),
        ("bf16-pure", 2, 2, 0, 4),
        ("bf16, params=bf16, master=split", 2, 2, 2, 8),
        ("bf16, params=bf16, master=fp32, grads=fp32", 2, 4, 4, 8),
    ],
)
def test_measured_bytes_are_those_the_plan_foretold(policy, params, grads, master, moments):
    model = nn.Linear(32, 16, bias=False)
    run = prepared(model, optimizer=torch.optim.AdamW, policy=policy)
    with run.autocast():
        loss = model(X).float().square().mean()
    run.step(loss)
    measured = run.stats().bytes
    expected = {"params": params, "grads": grads, "master": master, "moments": moments}
    counts = {"moments": 4}  # AdamW's step count is a number of four bytes
    assert measured == {role: 512 * each + counts.get(role, 0) for role, each in expected.items()}
    assert {k: v - counts.get(k, 0) for k, v in measured.items()} == run.plan.bytes


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16, params=bf16, master=split"])
def test_accumulation_equals_the_whole_batch(mlp, policy):
    runs = [prepared(mlp(), policy=policy) for _ in range(2)]
    whole, parts = runs
    for _ in range(3):
        whole.step(loss_of(whole))
        for i in range(4):
            with parts.autocast():
                x, y = X[2 * i : 2 * i + 2], Y[2 * i : 2 * i + 2]
                loss = F.cross_entropy(parts.model(x), y) / 4
            parts.backward(loss)
        parts.step()
    eps = {"fp32": 2.0**-20, "fp16": 2.0**-10}.get(policy, 2.0**-8)
    for name, value in whole.fp32_state_dict().items():
        # Three steps of 0.1 times gradients below one, each with roundings in another order.
        assert (value - parts.fp32_state_dict()[name]).abs().max() < 3 * 0.1 * 8 * eps


def test_a_bad_micro_batch_spoils_its_own_step_only(mlp):
    run = prepared(mlp(), policy="bf16")
    run.backward(loss_of(run))
    run.backward(loss_of(run, factor=math.nan))
    run.backward(loss_of(run))
    assert not run.step().applied
    assert run.step(loss_of(run)).applied


def test_clipping_is_torchs_and_the_norm_is_told_before_it(mlp):
    run = prepared(mlp(), policy="fp16", clip_norm=0.01)
    run.backward(loss_of(run))
    norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters()]) / 65536
    before = [p.detach().clone() for p in run.model.parameters()]
    assert run.step().grad_norm == pytest.approx(float(norm), rel=2.0**-20)
    moved = [a - b for a, b in zip(before, run.model.parameters(), strict=True)]
    total = torch.linalg.vector_norm(torch.stack([m.detach().norm() for m in moved]))
    # Each of 1600 differences of weights is rounded at the weights' magnitude.
    assert float(total) == pytest.approx(0.1 * 0.01, abs=1600**0.5 * 2.0**-24)


def test_several_groups_keep_their_own_settings(mlp):
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters()}], lr=0.1
    )
    run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
    before = {k: v.clone() for k, v in run.fp32_state_dict().items()}
    run.step(loss_of(run))
    after = run.fp32_state_dict()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed == {"3.weight", "3.bias"}


@pytest.mark.parametrize("policy", ["fp16", "bf16-pure", "bf16, params=bf16, master=split"])
def test_frozen_weights_stay_and_do_not_disturb(mlp, policy):
    model = mlp()
    model[0].requires_grad_(False)
    run = prepared(model, policy=policy)
    before = {k: v.clone() for k, v in run.fp32_state_dict().items()}
    assert run.step(loss_of(run)).applied
    after = run.fp32_state_dict()
    assert all(torch.equal(before[k], after[k]) for k in ("0.weight", "0.bias"))
    assert not torch.equal(before["3.weight"], after["3.weight"])


def test_weights_the_optimizer_does_not_hold_are_left_alone(mlp):
    model = mlp()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
    before = model[0].weight.detach().clone()
    run.step(loss_of(run))
    assert torch.equal(model[0].weight, before)
    assert run.fp32_state_dict()["0.weight"].dtype == torch.float32


def test_weights_added_to_the_optimizer_later_are_refused_rather_than_left_unguarded(mlp):
    model, extra = mlp(), nn.Linear(2, 2)
    run = prepared(model)
    run.optimizer.add_param_group({"params": list(extra.parameters())})
    loss = loss_of(run) + extra.weight.sum()
    with pytest.raises(ConfigError, match=r"parameters changed after prepare\(\)"):
        run.step(loss)


@pytest.mark.parametrize("lr", [math.nan, math.inf])
def test_a_learning_rate_that_is_no_number_is_refused(mlp, lr):
    run = prepared(mlp(), policy="fp32")
    run.optimizer.param_groups[0]["lr"] = lr
    before = run.model[0].weight.detach().clone()
    with pytest.raises(ConfigError, match=f"learning rate must be finite, got {lr}"):
        run.step(loss_of(run))
    assert torch.equal(run.model[0].weight, before)


def test_gradients_from_before_prepare_do_not_enter_the_first_step(mlp):
    def first_step(with_leftovers):
        model = mlp()
        if with_leftovers:
            F.cross_entropy(model(X), Y).mul(1e3).backward()
        run = prepared(model)
        run.step(loss_of(run))
        return model[0].weight

    assert torch.equal(first_step(with_leftovers=True), first_step(with_leftovers=False))


@pytest.mark.parametrize("policy", ["bf16-pure", "bf16, params=bf16, master=kahan", "fp16"])
def test_an_optimizer_may_bring_the_moments_it_has(mlp, policy):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    optimizer.zero_grad()
    run = nc.prepare(model, optimizer, policy=policy)
    assert run.step(loss_of(run)).applied
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {2.0}


RELEASED = ["fp32", "fp16", "fp8-delayed", "bf16-pure", "aggressive"] + [
    f"bf16, params=bf16, master={m}" for m in ("fp32", "kahan", "stochastic")
]


@pytest.mark.parametrize("policy", RELEASED)
@pytest.mark.parametrize("fused", [True, False])
def test_release_gives_back_a_plain_model_and_optimizer_that_go_on(mlp, policy, fused):
    model = mlp()
    classes = [type(m) for m in model.modules()]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    run = nc.prepare(model, optimizer, policy=policy)
    run.step(loss_of(run))
    full = {k: v.clone() for k, v in run.fp32_state_dict().items()}
    run.release()
    assert [type(m) for m in model.modules()] == classes
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(v, full[k]) for k, v in model.state_dict().items())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, parameters, strict=True))
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}


def test_a_released_model_may_be_prepared_again(mlp):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = nc.prepare(model, optimizer, policy="aggressive")
    run.step(loss_of(run))
    run.release()
    again = nc.prepare(model, optimizer, policy="fp16")
    assert again.step(loss_of(again)).applied


def test_release_gives_frozen_weights_back_in_fp32(mlp):
    model = mlp()
    model[0].requires_grad_(False)
    run = nc.prepare(
        model, torch.optim.SGD(model[3].parameters(), lr=0.1), policy="bf16, params=bf16"
    )
    run.release()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_keys_of_the_state_are_those_of_the_plain_model(mlp):
    model = mlp()
    keys = list(model.state_dict())
    run = prepared(model, policy="fp8-delayed; 0: fp32", scale_groups=())
    assert list(model.state_dict()) == keys
    assert list(run.fp32_state_dict()) == keys


@pytest.mark.parametrize("policy", ["bf16", "fp8-delayed", "bf16-pure"])
def test_evaluation_inside_the_region_changes_nothing(mlp, policy):
    def trained(evaluate):
        run = prepared(mlp(), policy=policy)
        for _ in range(3):
            run.step(loss_of(run))
            if evaluate:
                run.model.eval()
                with run.autocast(), torch.no_grad():
                    run.model(X * 100)
                run.model.train()
        return run.fp32_state_dict()

    with_it, without = trained(evaluate=True), trained(evaluate=False)
    assert all(torch.equal(v, without[k]) for k, v in with_it.items())


def test_regions_may_be_nested(mlp):
    run = prepared(mlp(), policy="bf16")
    with run.autocast():
        once = run.model(X)
        with run.autocast():
            twice = run.model(X)
    assert torch.equal(once, twice)


def test_a_weight_used_twice_has_both_gradients(mlp):
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    plain = copy.deepcopy(model)
    run = prepared(model, policy="fp16", loss_scale=nc.LossScale(init_scale=256.0))
    with run.autocast():
        loss = model(X).square().mean()
    run.backward(loss)
    plain(X).square().mean().backward()
    exact = plain[0].weight.grad
    # A chain of six fp16 products: each within an eps of exact.
    assert (layer.weight.grad / 256 - exact).norm() < 6 * 2.0**-10 * exact.norm()


def test_a_loss_that_is_no_number_is_refused(mlp):
    run = prepared(mlp())
    with run.autocast():
        output = run.model(X)
    with pytest.raises(
        ConfigError, match=r"must be one number that requires grad, got one of shape \(8, 16\)"
    ):
        run.backward(output)


def test_a_loss_without_gradients_is_refused(mlp):
    run = prepared(mlp())
    with torch.no_grad():
        loss = loss_of(run)
    with pytest.raises(ConfigError, match="got one without gradients"):
        run.step(loss)


def test_a_step_without_gradients_is_refused(mlp):
    with pytest.raises(ConfigError, match=r"has no gradients to use\. Call backward"):
        prepared(mlp()).step()


def test_a_loss_of_one_element_need_not_be_a_scalar(mlp):
    run = prepared(mlp())
    assert run.step(loss_of(run).reshape(1)).applied


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused(mlp):
    model = mlp()
    with pytest.raises(UnsupportedError, match="LBFGS evaluates the loss inside its step"):
        nc.prepare(model, torch.optim.LBFGS(model.parameters()), policy="fp32")


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(UnsupportedError, match=r"0 has sparse gradients.*sparse=False"):
        nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_that_are_not_fp32_are_refused_with_what_to_call(mlp, dtype):
    model = mlp().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedError, match=r"must be torch.float32 .* for 0.weight\. Call model.float\(\)"
    ):
        nc.prepare(model, optimizer, policy="fp32")


def test_frozen_weights_may_come_in_sixteen_bits(mlp):
    model = mlp()
    model[0].to(torch.bfloat16).requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy="bf16")
    assert run.step(loss_of(run)).applied


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is not supported:DeprecationWarning")
def test_a_scripted_module_is_refused(mlp):
    model = torch.jit.script(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="The model is a scripted module"):
        nc.prepare(model, optimizer, policy="bf16")


def test_a_model_called_outside_the_region_is_in_its_policy_too(mlp):
    run = prepared(mlp(), policy="bf16-pure")
    with run.autocast(), torch.no_grad():
        inside = run.model(X)
    with torch.no_grad():
        assert torch.equal(run.model(X), inside)


def test_a_model_compiled_before_is_prepared_like_any_other(mlp):
    plain, compiled = mlp(), mlp()
    compiled.compile(backend="eager")
    runs = [
        prepared(model, policy="bf16, params=bf16, master=split") for model in (plain, compiled)
    ]
    for run in runs:
        run.step(loss_of(run))
    assert torch.equal(plain[0].weight, compiled[0].weight)


@pytest.mark.usefixtures("guarded")
def test_a_region_inside_torchs_own_autocast_is_not_narrowed_natively(mlp):
    run = prepared(mlp(), policy="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16), run.autocast():
        result = run.model(X)
    assert result.isfinite().all()


def test_a_model_without_weights_is_refused(mlp):
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="The model has no parameters"):
        nc.prepare(nn.Tanh(), optimizer, policy="fp32")


def test_a_plan_made_before_is_carried_out(mlp, cpu):
    model = mlp()
    planned = nc.plan(model, "bf16", hardware=cpu, overrides={"3": "fp32"})
    run = prepared(model, policy=planned)
    assert run.plan is planned
    assert run.step(loss_of(run)).applied


def test_a_huge_first_scale_backs_off_until_it_trains(mlp):
    """FIELD: `init_scale=1e30` recovers."""
    run = prepared(mlp(), loss_scale=nc.LossScale(init_scale=1e30, max_scale=1e30))
    for _ in range(100):
        outcome = run.step(loss_of(run))
        if outcome.applied:
            break
    assert outcome.applied
    assert 1 < outcome.loss_scale < 2.0**24


def test_gradients_that_fp16_flushes_are_rescued_by_the_scale():
    def moved(initial):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        scale = nc.LossScale(init_scale=initial, min_scale=1.0)
        run = prepared(model, policy="fp16", loss_scale=scale)
        before = model[0].weight.detach().clone()
        with run.autocast():
            loss = model(X[:, :16]).sum() * 2.0**-26
        assert run.step(loss).applied
        return not torch.equal(model[0].weight, before)

    torch.manual_seed(0)
    assert moved(2.0**16)
    assert not moved(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.0}, "a finite number above 0"),
        ({"clip_norm": math.nan}, "a finite number above 0"),
        ({"clip_norm": -1.0}, "a finite number above 0"),
        ({"ema_decay": 1.0}, "at least 0 and below 1"),
        ({"max_skipped_steps": 0}, "must be at least 1"),
        ({"lost_updates_every": -1}, "or 0 to turn the measurement off"),
    ],
)
def test_settings_that_mean_nothing_are_refused(mlp, settings, message):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        nc.prepare(model, optimizer, policy="fp32", **settings)


def test_a_state_is_not_loaded_between_backward_and_step_where_a_loss_scale_would_change(mlp):
    run = prepared(mlp(), policy="fp16")
    state = copy.deepcopy(run.state_dict())
    run.step(loss_of(run, factor=math.inf))
    run.backward(loss_of(run))
    gradients = [p.grad.clone() for p in run.model.parameters()]
    with pytest.raises(ConfigError, match=r"load_state_dict\(\) was called between backward"):
        run.load_state_dict(state)
    pairs = zip(gradients, run.model.parameters(), strict=True)
    assert all(torch.equal(gradient, p.grad) for gradient, p in pairs)
    run.zero_grad()
    run.load_state_dict(state)
    assert run.step(loss_of(run)).loss_scale == 65536


class FailsAt(TorchDispatchMode):
    """Has no memory for one operation, the n-th."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no more")
        return op(*args, **(kwargs or {}))


MASTERS = [f"bf16, params=bf16, master={kind}" for kind in ("split", "fp32", "kahan", "none")]
ON_THE_WAY = [*POLICIES, *MASTERS, "fp16, params=fp16, grads=fp32", "bf16, moments=int8"]


@pytest.mark.parametrize("policy", ON_THE_WAY)
def test_a_prepare_that_fails_anywhere_leaves_everything_as_it_was(mlp, policy):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):  # moments, and gradients that no step has used
        optimizer.step()
        F.cross_entropy(model(X), Y).backward()
    weights, kinds = list(model.parameters()), [type(module) for module in model.modules()]
    before = [(p.grad, p.detach().clone(), p.grad.clone(), p.grad_dtype) for p in weights]
    states, output = copy.deepcopy(optimizer.state_dict()), model(X)
    settings = {"policy": policy, "ema_decay": 0.9, "fused_optimizer": "int8" in policy}
    for n in itertools.count(1, 5):
        with FailsAt(n) as failing, contextlib.suppress(MemoryError):
            run = nc.prepare(model, optimizer, **settings)
        if failing.left > 0:
            break  # it has all the memory it needs
        assert [type(module) for module in model.modules()] == kinds
        assert all(map(is_, model.parameters(), weights))
        assert all(map(is_, optimizer.param_groups[0]["params"], weights))
        for p, (grad, value, kept, dtype) in zip(weights, before, strict=True):
            assert p.grad is grad
            assert p.grad_dtype == dtype
            assert torch.equal(p, value)
            assert torch.equal(grad, kept)
        assert torch.equal(model(X), output)
        pairs = zip(
            *(each["state"].values() for each in (states, optimizer.state_dict())), strict=True
        )
        assert all(torch.equal(a[key], b[key]) for a, b in pairs for key in a)
    assert n > 5
    assert run.step(loss_of(run)).applied


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "bf16, params=bf16, master=split"])
def test_a_step_that_an_error_ends_leaves_no_gradients_for_the_next(mlp, policy):
    def trained(*, fails):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = nc.prepare(model, optimizer, policy=policy)
        if fails:

            def fail(*_):
                raise MemoryError("for moments")

            once = optimizer.register_step_pre_hook(fail)
            with pytest.raises(MemoryError, match="for moments"):
                run.step(loss_of(run, x=2 * X))
            once.remove()
        outcome = run.step(loss_of(run))
        return outcome.grad_norm, run.fp32_state_dict()

    (norm, weights), (wanted, expected) = trained(fails=True), trained(fails=False)
    assert norm == wanted
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
