"""Steps of somebody's own loop as CUDA graphs; on a CPU they are launched, and the same."""

import copy
import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.step.captured_step import MOST_NEW
from narrowcast.precision.step.cuda_graph import WARM_UP

SPLIT = "bf16, params=bf16, master=split"
INF = float("inf")


def mlp(device="cpu", **layers):
    torch.manual_seed(0)
    middle = layers.get("middle", nn.GELU())
    return nn.Sequential(nn.Linear(32, 64), middle, nn.Linear(64, 16)).to(device)


def prepared(policy="bf16", *, device="cpu", model=None, scheduled=True, **settings):
    model = mlp(device) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
    return nc.prepare(
        model, optimizer, policy=policy, clip_norm=1.0, scheduler=schedule, **settings
    )


def loss_with(run):
    return lambda x, y: F.cross_entropy(run.model(x).float(), y)


def batch(step, device="cpu", *, rows=8):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 32, generator=generator)
    return x.to(device), torch.randint(0, 16, (rows,), generator=generator).to(device)


def stepped(run, x, y):
    with run.autocast():
        loss = loss_with(run)(x, y)
    return run.step(loss), loss.detach()


def weights(run):
    return {name: value.clone() for name, value in run.fp32_state_dict().items()}


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


# Without a GPU.


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", SPLIT, "fp8-delayed"])
def test_on_a_cpu_steps_are_those_of_run_step_bit_for_bit(policy):
    mine = prepared(policy, ema_decay=0.9, lookahead=nc.Lookahead())
    theirs = prepared(policy, ema_decay=0.9, lookahead=nc.Lookahead())
    fast = mine.graphed(loss_with(mine))
    for step in range(6):
        x, y = batch(step)
        if step == 3:
            x[0, 0] = INF
        outcome = fast(x, y)
        expected, loss = stepped(theirs, x, y)
        assert torch.equal(fast.loss, loss) or step == 3
        for name in ("step", "applied", "lr", "loss_scale", "next_scale", "skip_reason"):
            assert getattr(outcome, name) == getattr(expected, name)
        assert outcome.applied is (step != 3)
        assert not fast.captured
    assert "need a GPU" in fast.why
    assert fast.why in repr(fast)
    assert_equal(weights(mine), weights(theirs))
    assert_equal(mine.ema_state_dict(), theirs.ema_state_dict())
    assert_equal(mine.eval_state_dict(), theirs.eval_state_dict())


@pytest.mark.parametrize("policy", ["fp32", "fp16", SPLIT])
def test_accumulated_steps_are_those_of_backward_per_micro_batch_bit_for_bit(policy):
    by_hand, mine = prepared(policy), prepared(policy)
    fast = mine.graphed(loss_with(mine), gradient_accumulation_steps=4)
    for number in range(3):
        x, y = batch(number)
        total = 0.0
        for rows in range(0, 8, 2):
            with by_hand.autocast():
                loss = loss_with(by_hand)(x[rows : rows + 2], y[rows : rows + 2]) / 4
            by_hand.backward(loss)
            total = total + loss.detach()
        mine_outcome, outcome = fast(x, y=y), by_hand.step()
        assert mine_outcome.grad_norm == outcome.grad_norm
        assert torch.equal(fast.loss, total)
    assert_equal(weights(mine), weights(by_hand))


def test_accumulation_is_the_gradient_of_the_mean_loss_of_plain_torch():
    run, plain = prepared("fp32", scheduled=False), mlp()
    run.graphed(loss_with(run), gradient_accumulation_steps=2)(*batch(0))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    F.cross_entropy(plain(batch(0)[0]), batch(0)[1]).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    for mine, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((torch.zeros(9, 32), torch.zeros(9)), "of shape"),
        ((torch.zeros(8, 32), torch.zeros(4)), "same multiple of 4"),
        ((1,), "no tensor"),
    ],
)
def test_inputs_without_equal_parts_are_refused(inputs, said):
    run = prepared()
    with pytest.raises(ConfigError, match=said):
        run.graphed(loss_with(run), gradient_accumulation_steps=4)(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", SPLIT])
def test_captured_accumulation_is_the_launched_one(policy, cuda):
    captured, launched = (prepared(policy, device="cuda") for _ in range(2))
    fast = captured.graphed(loss_with(captured), gradient_accumulation_steps=2)
    for number in range(WARM_UP + 4):
        x, y = batch(number, "cuda")
        fast(x, y)
        for part in range(2):
            with launched.autocast():
                loss = loss_with(launched)(x.chunk(2)[part], y.chunk(2)[part]) / 2
            launched.backward(loss)
        launched.step()
    assert fast.captured
    assert_equal(weights(captured), weights(launched))


def test_inputs_may_be_words_of_a_batch_and_nested():
    run = prepared("fp32")
    seen = []

    def loss_of(first, *, labels, extra):
        seen.append((type(extra), extra["kind"]))
        return F.cross_entropy(run.model(first + extra["more"][0]), labels)

    fast = run.graphed(loss_of)
    x, y = batch(0)
    given = {"labels": y, "extra": {"more": [torch.zeros_like(x)], "kind": "plain"}}
    assert fast(x, **given).applied
    assert seen == [(dict, "plain")]


def test_the_loss_of_a_step_stays_what_it_was():
    run = prepared("fp32")
    fast = run.graphed(loss_with(run))
    losses = []
    for step in range(3):
        fast(*batch(step))
        losses.append(fast.loss)
    assert len({loss.item() for loss in losses}) == 3
    assert not any(loss.requires_grad for loss in losses)


def test_gradients_that_are_there_already_are_refused():
    run = prepared("bf16")
    fast = run.graphed(loss_with(run))
    x, y = batch(0)
    with run.autocast():
        loss = loss_with(run)(x, y)
    run.backward(loss)
    with pytest.raises(ConfigError, match=r"there are gradients already.*run.zero_grad"):
        fast(x, y)
    assert run.steps_attempted == 0
    run.zero_grad()
    assert fast(x, y).applied


def test_an_input_whose_tensors_nobody_would_find_is_refused():
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    run = prepared("fp32")
    fast = run.graphed(lambda batch: run.model(batch["in"].x).sum())
    with pytest.raises(ConfigError, match=r"got Batch for input 0\['in'\]"):
        fast({"in": Batch(batch(0)[0])})


def test_an_input_that_requires_a_gradient_is_refused():
    run = prepared("fp32")
    fast = run.graphed(loss_with(run))
    x, y = batch(0)
    with pytest.raises(UnsupportedError, match="must not require grad, got input 0"):
        fast(x.requires_grad_(), y)


def test_a_number_that_is_another_in_every_step_is_refused_by_name():
    run = prepared("fp32")
    fast = run.graphed(lambda x, y, *, step: loss_with(run)(x, y) / step)
    for step in range(1, MOST_NEW + 1):
        fast(*batch(step), step=step)
    with pytest.raises(ConfigError, match=r"the input step \(17\).*torch.tensor"):
        fast(*batch(0), step=MOST_NEW + 1)


def test_a_number_of_a_few_values_is_not_refused():
    run = prepared("fp32")
    fast = run.graphed(lambda x, y, *, power: loss_with(run)(x, y) ** power)
    for step in range(3 * MOST_NEW):
        assert fast(*batch(step), power=1 + step % 3).applied


def test_what_is_no_function_and_no_count_is_refused():
    run = prepared("fp32")
    with pytest.raises(ConfigError, match="needs a function that returns the loss, got Tensor"):
        run.graphed(torch.zeros(()))
    with pytest.raises(ConfigError, match="signatures must be at least 1, got 0"):
        run.graphed(loss_with(run), signatures=0)


def test_what_is_no_loss_is_refused():
    run = prepared("fp32")
    fast = run.graphed(lambda x, y: run.model(x))
    with pytest.raises(ConfigError, match=r"got one of shape \(8, 16\)"):
        fast(*batch(0))


def test_it_is_refused_while_other_weights_stand_in():
    run = prepared("fp32", ema_decay=0.9)
    fast = run.graphed(loss_with(run))
    fast(*batch(0))
    with run.use_ema(), pytest.raises(ConfigError, match="a graphed step was called inside"):
        fast(*batch(1))


def test_averages_of_hybrid_training_follow_its_steps():
    runs = []
    for _ in range(2):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        runs.append(nc.hybrid(model, optimizer, steps=20, policy="fp32"))
    mine, theirs = runs
    fast = mine.graphed(lambda x, y: F.cross_entropy(mine.model(x), y))
    for step in range(8):
        x, y = batch(step)
        fast(x, y)
        with theirs.autocast():
            loss = F.cross_entropy(theirs.model(x), y)
        theirs.step(loss)
    for name in mine.readouts.names:
        assert_equal(mine.readouts.weights(name), theirs.readouts.weights(name))


# On a GPU. Kernels that add up in another order round to the neighbour in bf16: as in
# tests/training/step/test_stepping.py.
gpu = pytest.mark.gpu
ROUNDING = 2.0**-9
STEPS = 20


def assert_same_course(mine, theirs, start):
    for name, value in theirs.items():
        moved = (value - start[name]).norm()
        assert moved > 0
        assert (mine[name] - value).norm() <= ROUNDING * moved, name


@gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", SPLIT])
def test_captured_steps_are_the_launched_ones(policy, cuda):
    """Also where one of them overflows: it is skipped, the scale gives way, the schedule waits."""
    mine, theirs = (prepared(policy, device="cuda", ema_decay=0.9) for _ in range(2))
    start, fast, bad = weights(mine), mine.graphed(loss_with(mine)), WARM_UP + 6
    for step in range(STEPS):
        x, y = batch(step, "cuda")
        if step == bad:
            x[0, 0] = INF
        outcome = fast(x, y)
        expected, loss = stepped(theirs, x, y)
        assert fast.captured is (step >= WARM_UP), fast
        assert outcome.applied is expected.applied is (step != bad)
        assert (outcome.step, outcome.lr) == (expected.step, expected.lr)
        assert (outcome.loss_scale, outcome.next_scale) == (
            expected.loss_scale, expected.next_scale,
        )  # fmt: skip
        if step != bad:
            assert fast.loss.item() == pytest.approx(loss.item(), rel=ROUNDING)
            assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=ROUNDING)
    assert_same_course(weights(mine), weights(theirs), start)
    assert_same_course(mine.ema_state_dict(), theirs.ema_state_dict(), start)
    assert mine.steps_applied == theirs.steps_applied == STEPS - 1


@gpu
@pytest.mark.parametrize("policy", ["fp8-tensor", "fp8-delayed"])
def test_scales_of_fp8_move_in_a_replay_as_in_a_launch(policy, cuda):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    runs = []
    for _ in range(2):
        model = mlp("cuda")
        plan = nc.plan(model, policy, hardware=nc.detect_hardware("cuda"), skip_slow_fp8=False)
        runs.append(prepared(plan, model=model))
    mine, theirs = runs
    start, fast = weights(mine), mine.graphed(loss_with(mine))
    for step in range(STEPS):
        x, y = batch(step, "cuda", rows=16)
        fast(x, y)
        stepped(theirs, x, y)
    assert fast.captured
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
def test_each_of_several_shapes_is_captured_and_kept(cuda):
    mine, theirs = (prepared(SPLIT, device="cuda") for _ in range(2))
    start, calls = weights(mine), []

    def loss_of(x, y):
        calls.append(len(x))
        return loss_with(mine)(x, y)

    fast = mine.graphed(loss_of)
    for step in range(30):
        x, y = batch(step, "cuda", rows=(8, 16, 24)[step % 3])
        fast(x, y)
        stepped(theirs, x, y)
    assert fast.captured
    assert "3 of at most 4 signatures captured" in repr(fast)
    # Twice launched and once captured, each; the first three steps are launched anyway.
    assert [calls.count(rows) for rows in (8, 16, 24)] == [3, 3, 3]
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
def test_signatures_beyond_the_bound_are_launched_and_that_is_told(cuda):
    mine, theirs = (prepared("bf16", device="cuda") for _ in range(2))
    start, fast = weights(mine), mine.graphed(loss_with(mine), signatures=1)
    for step in range(16):
        rows = 8 if step < 6 or step % 2 else 16
        x, y = batch(step, "cuda", rows=rows)
        fast(x, y)
        stepped(theirs, x, y)
        if step >= 6:
            assert fast.captured is (rows == 8)
    fast(*batch(0, "cuda", rows=16))
    assert "signatures=" in fast.why
    stepped(theirs, *batch(0, "cuda", rows=16))
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
@pytest.mark.parametrize("policy", ["fp16", SPLIT])
def test_replayed_steps_and_steps_by_hand_may_take_turns(policy, cuda):
    """A launched step finds its gradients where they were before, and replays were between."""
    mine, theirs = (prepared(policy, device="cuda") for _ in range(2))
    start, fast = weights(mine), mine.graphed(loss_with(mine))
    for step in range(STEPS):
        x, y = batch(step, "cuda")
        if step % 3 == 2:
            stepped(mine, x, y)
        else:
            fast(x, y)
        stepped(theirs, x, y)
    assert fast.captured
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
def test_numbers_beside_the_tensors_are_captured_each_by_itself(cuda):
    mine, theirs = (prepared("fp32", device="cuda") for _ in range(2))
    start = weights(mine)
    fast = mine.graphed(lambda x, y, *, share: share * loss_with(mine)(x, y))
    for step in range(STEPS):
        x, y = batch(step, "cuda")
        share = 1.0 if step % 2 else 0.25
        fast(x, y, share=share)
        with theirs.autocast():
            loss = share * loss_with(theirs)(x, y)
        theirs.step(loss)
        assert fast.loss.item() == pytest.approx(loss.item(), rel=ROUNDING)
    assert fast.captured
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_on_the_host_are_brought_to_the_device(pinned, cuda):
    mine, theirs = (prepared("fp32", device="cuda") for _ in range(2))
    start, fast = weights(mine), mine.graphed(loss_with(mine))
    for step in range(WARM_UP + 4):
        x, y = batch(step)
        fast(*(t.pin_memory() if pinned else t for t in (x, y)))
        stepped(theirs, x.cuda(), y.cuda())
    assert fast.captured
    assert_same_course(weights(mine), weights(theirs), start)


@gpu
def test_dropout_draws_anew_in_every_replay(cuda):
    model = mlp("cuda", middle=nn.Dropout(0.5))
    run = prepared("fp32", model=model, scheduled=False)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    fast = run.graphed(loss_with(run))
    x, y = batch(0, "cuda")
    losses = set()
    for _ in range(WARM_UP + 5):
        fast(x, y)
        losses.add(fast.loss.item())
    assert fast.captured
    assert len(losses) == WARM_UP + 5


@gpu
@pytest.mark.parametrize("how", ["item", "mask", "host"])
def test_a_loss_that_waits_for_the_device_is_refused_with_its_line(how, cuda):
    run = prepared("bf16", device="cuda")
    losses = []

    def loss_of(x, y):
        loss = loss_with(run)(x, y)
        losses.append(weakref.ref(loss))
        if how == "item" and loss.detach().item() > 1e9:
            return loss * 0
        if how == "mask":
            return loss + x[x > 0].sum() * 0
        return loss * torch.tensor([1.0], device="cuda").sum() if how == "host" else loss

    fast = run.graphed(loss_of)
    for step in range(WARM_UP - 1):
        fast(*batch(step, "cuda"))
    before = weights(run)
    told = r"waits for the device at test_captured_step.py:"
    with pytest.raises(UnsupportedError, match=told) as refused:
        fast(*batch(WARM_UP, "cuda"))
    assert_equal(weights(run), before)
    # Whoever holds the error holds no graph: a step by hand would meet its nodes.
    assert "synchronizing CUDA operation" in str(refused.value.__cause__)
    assert [each() for each in losses] == [None] * WARM_UP
    assert run.steps_attempted == WARM_UP - 1
    assert stepped(run, *batch(0, "cuda"))[0].applied


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 16)
        self.register_buffer("past", torch.zeros(8, 16))

    def forward(self, x):
        out = self.layer(x)
        mixed = out + self.past
        self.past = out.detach().float()
        return mixed


@gpu
def test_a_buffer_that_is_replaced_is_refused_by_name(cuda):
    run = prepared("fp32", model=Queue().cuda())
    fast = run.graphed(loss_with(run))
    for step in range(WARM_UP - 1):
        fast(*batch(step, "cuda"))
    with pytest.raises(UnsupportedError, match=r"replaces the buffer past.*copy_"):
        fast(*batch(WARM_UP, "cuda"))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.relu(norm(x)))
        return self.head(x.mean((2, 3)))


@gpu
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_bad_batch_leaves_running_statistics_clean(policy, cuda):
    torch.manual_seed(0)
    scale = 1024.0 if policy == "fp16" else None  # one at which no good batch overflows
    run = prepared(policy, model=Residual().cuda(), loss_scale=scale)
    fast = run.graphed(loss_with(run))
    generator = torch.Generator(cuda).manual_seed(0)
    bad = WARM_UP + 3
    for step in range(WARM_UP + 7):
        x = torch.randn(8, 3, 8, 8, generator=generator, device=cuda)
        y = torch.randint(0, 4, (8,), generator=generator, device=cuda)
        if step == bad:
            x[0, 0, 0, 0] = INF
        before = {name: b.clone() for name, b in run.model.named_buffers()}
        assert fast(x, y).applied is (step != bad)
        for name, buffer in run.model.named_buffers():
            assert torch.equal(buffer, before[name]) is (step == bad), (step, name)
            assert bool(buffer.isfinite().all())
    assert fast.captured


@gpu
@pytest.mark.parametrize("what", ["change", "load", "freeze", "optimizer"])
def test_what_a_graph_does_not_know_of_is_captured_anew(what, cuda):
    mine, theirs = (prepared("bf16", device="cuda") for _ in range(2))
    start, fast = weights(mine), mine.graphed(loss_with(mine))
    saved = None
    for step in range(4 * WARM_UP):
        if step == 3:
            saved = [run.state_dict() for run in (mine, theirs)]
            saved = [torch.utils._pytree.tree_map(_copied, each) for each in saved]
        if step == 2 * WARM_UP:
            for run, state in zip((mine, theirs), saved, strict=True):
                if what == "change":
                    run.set_policy(SPLIT)
                if what == "load":
                    run.load_state_dict(state)
                if what == "freeze":
                    run.model[0].bias.requires_grad_(False)
                if what == "optimizer":
                    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        x, y = batch(step, "cuda")
        fast(x, y)
        stepped(theirs, x, y)
        assert fast.captured is (step % (2 * WARM_UP) >= WARM_UP), step
    assert_same_course(weights(mine), weights(theirs), start)


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


@gpu
@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (torch.optim.SGD, "not use the fused kernel"),
        (torch.optim.Adagrad, "not use the fused kernel"),
    ],
)
def test_an_optimizer_that_no_graph_holds_is_refused(optimizer, why, cuda):
    model = mlp("cuda")
    run = nc.prepare(model, optimizer(model.parameters(), lr=0.01), policy="bf16")
    with pytest.raises(UnsupportedError, match=f"graphed.*{why}.*run.step"):
        run.graphed(loss_with(run))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.drop = nn.Linear(32, 32), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(F.gelu(self.layer(x)))


def saving_memory(memory, dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout) for _ in range(2))).cuda()
    return prepared("bf16", model=model, memory=memory)


@gpu
def test_moments_on_the_host_are_refused(cuda):
    run = saving_memory(nc.Memory(offload=["optimizer"]))
    with pytest.raises(UnsupportedError, match=r"graphed.*memory.offload"):
        run.graphed(loss_with(run))


@gpu
def test_blocks_are_computed_again_in_a_replay_unless_they_draw_random_numbers(cuda):
    run = saving_memory(nc.Memory(activation_checkpointing="blocks"))
    fast = run.graphed(loss_with(run))
    for step in range(WARM_UP + 2):
        assert fast(*batch(step, "cuda")).applied
    assert fast.captured
    run = saving_memory(nc.Memory(activation_checkpointing="blocks"), dropout=0.2)
    fast = run.graphed(loss_with(run))
    for step in range(WARM_UP - 1):
        fast(*batch(step, "cuda"))
    with pytest.raises(
        UnsupportedError, match=r"memory.activation_checkpointing .* random numbers"
    ):
        fast(*batch(step, "cuda"))
