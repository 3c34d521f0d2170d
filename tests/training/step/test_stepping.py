"""Steps launched and steps replayed: the same numbers, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Hardware, detect_hardware
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.step.cuda_graph import WARM_UP
from narrowcast.training.setup import lr_factor, prepare_recipe
from narrowcast.training.step.stepping import Stepper
from narrowcast.training.task import Hook, Task

WIDTH = 32
EMULATING = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)


def task_of(model, hooks=()):
    """Two layers that learn a fixed linear map; nothing is drawn at random on the way."""
    return Task(
        model=model,
        train_data=[],
        loss=lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1]),
        evaluate=lambda model: {"loss": 0.0},
        items=lambda batch: len(batch[0]),
        gemm_rows=16,
        hooks=hooks,
    )


def recipe(policy="fp32", **settings):
    sections = {
        "precision": {"policy": policy, **settings.pop("precision", {})},
        "optimizer": {"lr": 0.01},
        "lr_schedule": {"name": "cosine", "warmup": 2},
        "clip_norm": 1.0,
        **settings,
    }
    return Recipe(
        workload="lm", steps=20, batch_size=8, data=DataSection(), model=Section(), **sections
    )


def made(policy="fp32", *, device="cpu", hooks=(), **settings):
    """A stepper and what it steps, from one seed."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, WIDTH)
    model = nn.Sequential(*layers).to(device)
    asked = recipe(policy, **settings)
    hardware = EMULATING if device == "cpu" else detect_hardware(device)
    plan = make_plan(model, policy, hardware=hardware, skip_slow_fp8=False)
    task = task_of(model, hooks)
    prepared = prepare_recipe(asked, task, plan=plan)
    return Stepper(prepared, task, asked), prepared


def batches(step, *, count=1, size=16, device="cpu"):
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(size, WIDTH, generator=generator) for _ in range(count)]
    return [(x.to(device), x.roll(1, -1).to(device)) for x in drawn]


def weights(prepared):
    return {name: value.clone() for name, value in prepared.fp32_state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_cpu_that_is_asked_for_cuda_graphs_is_refused_with_what_to_write():
    with pytest.raises(
        UnsupportedError, match=r"CUDA graphs do not run on cpu\. .*cuda_graph=null"
    ):
        made(cuda_graph=True)


@pytest.mark.parametrize("wish", [None, False])
def test_a_cpu_that_is_left_the_choice_launches(wish):
    stepper, _ = made(cuda_graph=wish)
    for step in range(WARM_UP + 2):
        outcome, _ = stepper(batches(step))
        assert outcome.applied
        assert not stepper.captured


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8-delayed"])
def test_steps_are_those_taken_by_hand_bit_for_bit(accumulate, policy):
    stepper, mine = made(policy)
    _, theirs = made(policy)
    for step in range(6):
        given = batches(step, count=accumulate)
        outcome, mean = stepper(given)
        losses = []
        for batch in given:
            with theirs.autocast():
                loss = F.mse_loss(theirs.model(batch[0]).float(), batch[1])
            theirs.backward(loss / accumulate)
            losses.append(loss.item())
        expected = theirs.step()
        assert (outcome.applied, outcome.grad_norm, outcome.lr, outcome.loss_scale) == (
            expected.applied, expected.grad_norm, expected.lr, expected.loss_scale,
        )  # fmt: skip
        # Three fp32 numbers added in fp32 here, in float64 there.
        assert mean.item() == pytest.approx(sum(losses) / accumulate, rel=3 * 2.0**-24)
        assert equal(weights(mine), weights(theirs))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_fp32_step_is_that_of_plain_torch_bit_for_bit(accumulate):
    stepper, mine = made("fp32", clip_norm=None)
    torch.manual_seed(0)
    plain = copy.deepcopy(mine.release())
    stepper, mine = made("fp32", clip_norm=None)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    factor = lr_factor(recipe().lr_schedule, 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(6):
        given = batches(step, count=accumulate)
        stepper(given)
        for x, y in given:
            (F.mse_loss(plain(x), y) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert equal(weights(mine), dict(plain.state_dict()))


def test_a_step_that_overflows_is_skipped_and_nothing_moves():
    stepper, prepared = made("fp16")
    stepper(batches(0))
    before = weights(prepared)
    x, y = batches(1)[0]
    outcome, _ = stepper([(x * float("inf"), y)])
    after, _ = stepper(batches(2))
    assert (outcome.applied, after.applied) == (False, True)
    assert after.loss_scale == outcome.loss_scale / 2
    assert after.lr == outcome.lr
    assert not equal(weights(prepared), before)


# What follows needs a GPU: only there are steps replayed.
STEPS = WARM_UP + 7
gpu = pytest.mark.gpu


def needs_fp8(policy):
    if policy.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")


def both(policy, **settings):
    """A stepper that replays and one that launches, from the same seed."""
    return [made(policy, device="cuda", cuda_graph=wish, **settings) for wish in (True, False)]


# The same kernels on the same numbers; but a sum may be added in another order, and then round to
# the neighbour in bf16. A weight that is one update too old shows in the first digit.
ROUNDING = 2.0**-9


def assert_same_course(mine, theirs, start):
    for name, value in theirs.items():
        moved = (value - start[name]).norm()
        assert moved > 0
        assert (mine[name] - value).norm() <= ROUNDING * moved


@gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8-tensor", "fp8-delayed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_replayed_steps_are_the_launched_ones(policy, accumulate):
    needs_fp8(policy)
    (replayed, mine), (launched, theirs) = both(policy)
    start = weights(mine)
    for step in range(STEPS):
        given = batches(step, count=accumulate, device="cuda")
        (a, loss), (b, other) = replayed(given), launched(given)
        assert loss.item() == pytest.approx(other.item(), rel=ROUNDING)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=ROUNDING)
        assert (a.applied, a.lr, a.loss_scale) == (b.applied, b.lr, b.loss_scale)
        assert (a.lost_updates is None) is (b.lost_updates is None)
        assert replayed.captured is (step >= WARM_UP)
        assert not launched.captured
    assert_same_course(weights(mine), weights(theirs), start)
    assert mine.steps_applied == theirs.steps_applied == STEPS


def averages(prepared):
    return {i: average.clone() for i, average in enumerate(prepared.state_dict()["average"])}


@gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16, params=bf16, master=split"])
def test_the_average_moves_in_a_replayed_step_as_in_a_launched_one(policy):
    """Also where a weight has no gradient when the step is captured, and not in a skipped step."""
    (replayed, mine), (launched, theirs) = both(policy, ema={"decay": 0.5})
    start = averages(mine)
    for step in range(STEPS):
        if step == 2:
            for prepared in (mine, theirs):
                prepared.model[0].bias.requires_grad_(False)
        ((x, y),) = batches(step, device="cuda")
        bad = step == WARM_UP + 3
        given = [(x * float("inf") if bad else x, y)]
        before = averages(mine)
        replayed(given)
        launched(given)
        still = [torch.equal(now, before[i]) for i, now in averages(mine).items()]
        assert all(still) if bad else not still[0]
        assert replayed.captured is (step >= WARM_UP)
    assert_same_course(averages(mine), averages(theirs), start)


@gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_another_policy_is_captured_anew_and_steps_as_the_launched_one(compiled):
    needs_fp8("fp8-delayed")
    (replayed, mine), (launched, theirs) = both("bf16", compile=compiled)
    start, step = weights(mine), 0
    for policy in ("bf16", "fp8-delayed", "aggressive", "bf16"):
        for stepper, prepared in ((replayed, mine), (launched, theirs)):
            hardware = prepared.plan.hardware
            prepared.set_policy(
                make_plan(prepared.model, policy, hardware=hardware, skip_slow_fp8=False)
            )
            stepper.drop_graphs()
        for taken in range(WARM_UP + 3):
            given = batches(step, device="cuda")
            (_, loss), (_, other) = replayed(given), launched(given)
            assert loss.item() == pytest.approx(other.item(), rel=2**-5)
            assert replayed.captured is (taken >= WARM_UP)
            step += 1
    assert mine.steps_applied == theirs.steps_applied == step
    for name, value in weights(theirs).items():
        moved = (value - start[name]).norm()
        assert (weights(mine)[name] - value).norm() <= 2**-5 * moved


@gpu
def test_the_schedule_moves_under_replay():
    stepper, prepared = made("bf16", device="cuda", cuda_graph=True)
    factor = lr_factor(recipe().lr_schedule, 20)
    outcomes = [stepper(batches(step, device="cuda"))[0] for step in range(STEPS)]
    assert [o.lr for o in outcomes] == [0.01 * factor(step) for step in range(STEPS)]
    # And not in words only: without a rate no weight moves, whatever its gradient.
    before = weights(prepared)
    prepared.sync()
    for group in prepared.optimizer.param_groups:
        group["lr"] = 0.0
    stepper(batches(STEPS, device="cuda"))
    assert equal(weights(prepared), before)


@gpu
def test_an_overflow_under_replay_moves_nothing_halves_the_scale_and_holds_the_schedule():
    scale = {"loss_scale": {"init_scale": 1024.0}}
    (replayed, mine), (launched, theirs) = both("fp16", precision=scale)
    start, bad = weights(mine), WARM_UP + 3
    for step in range(STEPS):
        ((x, y),) = batches(step, device="cuda")
        given = [(x * float("inf") if step == bad else x, y)]
        before = weights(mine)
        (a, _), (b, _) = replayed(given), launched(given)
        assert (a.applied, a.lr, a.loss_scale) == (b.applied, b.lr, b.loss_scale)
        assert a.applied is (step != bad)
        assert a.loss_scale == (1024.0 if step <= bad else 512.0)
        assert equal(weights(mine), before) is (step == bad)
    assert replayed.captured
    assert mine.steps_applied == STEPS - 1
    factor = lr_factor(recipe().lr_schedule, 20)
    assert a.lr == 0.01 * factor(STEPS - 2)
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
@pytest.mark.parametrize("policy", ["bf16", "fp8-delayed"])
def test_batches_of_another_shape_are_captured_anew(policy):
    needs_fp8(policy)
    (replayed, mine), (launched, theirs) = both(policy)
    start = weights(mine)
    for step in range(STEPS):
        size = 48 if step >= WARM_UP + 3 else 16
        given = batches(step, size=size, device="cuda")
        loss, other = replayed(given)[1], launched(given)[1]
        assert loss.item() == pytest.approx(other.item(), rel=ROUNDING)
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
@pytest.mark.parametrize("policy", ["bf16", "fp8-tensor", "fp8-delayed"])
def test_an_evaluation_at_any_time_sees_the_weights_of_now_and_changes_no_step(policy):
    """Also right before the capture, when it has just made the fp8 weights that steps need."""
    needs_fp8(policy)
    (replayed, mine), (launched, theirs) = both(policy)
    start = weights(mine)
    for step in range(STEPS):
        given = batches(step, device="cuda")
        replayed(given)
        launched(given)
        outputs = []
        for prepared in (mine, theirs):
            with torch.no_grad(), prepared.autocast():
                outputs.append(prepared.model(given[0][0]).float())
        assert (outputs[0] - outputs[1]).norm() <= ROUNDING * outputs[1].norm()
    assert replayed.captured
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
def test_what_cannot_be_captured_on_a_gpu_is_refused_or_launched():
    for settings, why in (
        ({"deterministic": True}, "deterministic kernels may wait"),
        ({"optimizer": {"name": "sgd", "lr": 0.01}}, "does not use the fused kernel"),
    ):
        with pytest.raises(UnsupportedError, match=f"{why}.*Write cuda_graph=null"):
            made("bf16", device="cuda", cuda_graph=True, **settings)
        stepper, _ = made("bf16", device="cuda", cuda_graph=None, **settings)
        for step in range(WARM_UP + 2):
            stepper(batches(step, device="cuda"))
        assert not stepper.captured


CLIPPED = 0.01


def clips_the_first_layer(prepared):
    nn.utils.clip_grad_norm_(prepared.model[0].parameters(), CLIPPED)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_hook_clips_true_gradients_as_torch_does_before_its_step(policy, count):
    _, plain = made(policy, clip_norm=None)
    stepper, prepared = made(
        policy, hooks=(Hook(name="clip", after_backward=clips_the_first_layer),), clip_norm=None
    )
    assert equal(weights(plain), weights(prepared))
    for step in range(3):
        given = batches(step, count=count)
        for x, y in given:
            with plain.autocast():
                loss = F.mse_loss(plain.model(x).float(), y)
            plain.backward(loss / count)
        plain.unscale()
        clips_the_first_layer(plain)
        plain.step()
        outcome, _ = stepper(given)
        assert outcome.applied
    assert equal(weights(plain), weights(prepared))


@pytest.mark.gpu
def test_a_hook_of_gradients_is_captured_with_the_step_unless_a_scale_is_divided_out():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    hooks = (Hook(name="clip", after_backward=clips_the_first_layer),)
    launched, one = made("bf16", device="cuda", hooks=hooks, clip_norm=None, cuda_graph=False)
    replayed, other = made("bf16", device="cuda", hooks=hooks, clip_norm=None)
    for step in range(WARM_UP + 4):
        given = batches(step, device="cuda")
        launched(given)
        replayed(given)
    assert replayed.captured
    assert equal(weights(one), weights(other))
    with pytest.raises(UnsupportedError, match="a hook of the task edits gradients"):
        made("fp16", device="cuda", hooks=hooks, cuda_graph=True)
