"""Verdicts on numbers that really go wrong: where they are said to have begun, and that asking
leaves no trace."""

import copy
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

POLICIES = ["fp32", "bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-delayed"]
NAMES = ("module", "role", "kind", "phase", "origin")


def named(verdict):
    return tuple(getattr(verdict, name) for name in NAMES)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_said_of_passes_in_which_everything_is_finite(net, batch, policy):
    run, loss_of = net(policy)
    assert nc.explain(run, [batch(0), batch(1)], loss_of) is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("bad", "kind"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")]
)
def test_a_batch_that_holds_a_nan_is_blamed_with_the_sample_and_the_micro_batch(
    net, batch, policy, bad, kind
):
    run, loss_of = net(policy)
    x, y = batch(1, 20)
    x[17, 3] = bad
    verdict = nc.explain(run, [batch(0), (x, y), batch(2)], loss_of)
    assert named(verdict) == ("", "batch", kind, "forward", "data")
    assert (verdict.sample, verdict.micro_batch, verdict.micro_batches) == (17, 2, 3)
    word = "a NaN" if kind == "nan" else "an infinity" if bad > 0 else "a negative infinity"
    assert verdict.sentence == (
        f"the batch itself holds {word} at batch[0][17, 3], 1 of 320 values (micro-batch 2 of 3)"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_that_is_not_finite_is_blamed_before_what_it_makes(net, batch, policy):
    run, loss_of = net(policy)
    with torch.no_grad():
        run.model.blocks[1].up.weight[3, 5] = math.nan
    verdict = nc.explain(run, [batch()], loss_of)
    assert named(verdict) == ("blocks.1.up", "weight", "nan", "forward", "model")
    assert "earlier checkpoint" in verdict.advice(loss_scale=1.0)


def test_a_product_that_fp16_cannot_hold_is_an_overflow_of_that_output(net, batch):
    run, loss_of = net("fp16")
    with torch.no_grad():
        run.model.blocks[0].down.weight.fill_(6e4)  # fits, and so does what goes in
    verdict = nc.explain(run, [batch()], loss_of)
    assert named(verdict) == ("blocks.0.down", "output", "inf", "forward", "model")
    assert verdict.sentence.startswith(
        "blocks.0.down output overflowed fp16 (amax inf, micro-batch 1"
    )
    assert "weight of 6.0e4, both finite" in verdict.sentence
    assert verdict.advice().startswith('try policy="fp16; blocks.0.down: bf16; head: bf16')


def test_what_is_made_between_modules_is_told_with_the_modules_around_it(net, batch):
    run, loss_of = net("bf16")
    run.model.between = lambda x: x * 1e38 * 10
    verdict = nc.explain(run, [batch()], loss_of)
    assert named(verdict) == ("blocks.1", "input", "inf", "forward", "model")
    assert verdict.evidence == "made between blocks.0 and it"


def test_an_input_that_fp16_cannot_hold_is_an_overflow_where_it_is_cast(net, batch):
    run, loss_of = net("fp16")
    x, y = batch()
    x[2, 2] = 7e4  # a number like any other in fp32, in which it comes
    verdict = nc.explain(run, [(x, y)], loss_of)
    assert named(verdict) == ("first", "input", "large", "forward", "model")
    assert verdict.sentence.startswith(
        "first input overflowed fp16 (amax 7.0e4, micro-batch 1 of 1)"
    )


def test_a_loss_that_its_own_arithmetic_makes_infinite_is_blamed_itself(net, batch):
    run, loss_of = net("fp32")
    verdict = nc.explain(run, [batch()], lambda each: (loss_of(each) * 0.0).log())
    assert named(verdict) == ("", "loss", "inf", "forward", "model")
    assert verdict.sentence.startswith("the loss became infinite")


def test_a_gradient_that_only_the_backward_pass_makes_nan_is_found_there(net, batch):
    """The square root of zero: its value is fine, its slope is not."""
    run, loss_of = net("fp32")
    run.model.between = lambda x: x + (x * 0.0).square().sum().sqrt()
    verdict = nc.explain(run, [batch()], loss_of)
    assert named(verdict) == ("blocks.0", "grad_output", "nan", "backward", "model")


def test_a_loss_scale_that_is_too_high_is_told_as_the_cause(net, batch, step):
    scale = nc.LossScale(init_scale=2.0**24, max_scale=2.0**24)
    run, loss_of = net("fp16", loss_scale=scale)
    outcome = step(run, loss_of, [batch()])
    assert not outcome.applied
    verdict = nc.explain(run, [batch()], loss_of, loss_scale=outcome.loss_scale)
    assert (verdict.module, verdict.role, verdict.phase) == ("head", "grad_output", "backward")
    assert verdict.kind == "large"  # emulated, it is seen before the cast: 2**24 / 8 at the most
    assert 65504 < verdict.amax <= 2.0**21
    assert "backs off by itself" in verdict.advice(loss_scale=outcome.loss_scale)


def test_the_scale_of_the_step_in_question_is_in_force_and_not_that_of_now(net, batch, step):
    """Between the two scales lies the largest at which this step is finite."""
    run, loss_of = net("fp16")
    finite = [
        scale
        for scale in (2.0**n for n in range(8, 30))
        if nc.explain(run, [batch()], loss_of, loss_scale=scale) is None
    ]
    threshold = max(finite)
    for initial, applied in ((threshold, True), (threshold * 2, False)):
        scale = nc.LossScale(init_scale=initial, max_scale=2.0**30)
        run, loss_of = net("fp16", loss_scale=scale)
        assert step(run, loss_of, [batch()]).applied is applied


def test_gradients_that_only_their_sum_makes_infinite_are_found(net, batch):
    run, _ = net("fp32")
    # Each below the limit, of which three make more: the norm is of all of them.
    verdict = nc.explain(
        run, [batch()] * 3, lambda each: run.model.head.bias.sum() * 1.5e19 + 0 * each[0].sum()
    )
    assert (verdict.module, verdict.role, verdict.phase) == ("head", "grad_weight", "backward")
    assert "the norm of their sum is not" in verdict.sentence


class Masking(nn.Module):
    def forward(self, scores):
        return scores.masked_fill(torch.tensor([False, False, False, True]), -math.inf)


def test_a_module_may_mask_scores_through_which_gradients_flow(batch):
    model = nn.Sequential(nn.Linear(16, 4), Masking(), nn.Softmax(-1), nn.Linear(4, 1))
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    assert nc.explain(run, [batch()[0]], lambda x: model(x).sum()) is None


def test_a_mask_may_hold_its_infinities(batch):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x, mask):
            return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]

    torch.manual_seed(0)
    model = Masked()
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")
    for mask in (
        torch.triu(torch.full((8, 8), -math.inf), 1),
        torch.triu(torch.full((8, 8), -3e38), 1),
    ):
        given = (batch()[0][None], mask)
        assert nc.explain(run, [given], lambda b: model(*b).square().mean()) is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_activation_checkpointing_does_not_change_what_is_named(net, batch, reentrant, where):
    run, loss_of = net("bf16")
    block = run.model.blocks[1]
    plain = block.forward
    block.forward = lambda x: checkpoint(plain, x, use_reentrant=reentrant)
    if where == "forward":
        with torch.no_grad():
            block.down.weight.fill_(3e38)
    else:
        block.drop.register_full_backward_pre_hook(lambda _, grads: [g * math.nan for g in grads])
    verdict = nc.explain(run, [batch()], loss_of)
    block.forward = plain
    assert nc.explain(run, [batch()], loss_of).location == verdict.location


def everything(run):
    """All that decides the steps to come, and all that a pass could have changed."""
    state = copy.deepcopy(run.state_dict())
    return {
        "state": state,
        "grads": [None if p.grad is None else p.grad.clone() for p in run.model.parameters()],
        "buffers": [b.clone() for b in run.model.buffers()],
        "torch": torch.get_rng_state(),
        "python": random.getstate()[1],
        "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64)),
    }


def assert_same(a, b, where="run"):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.mark.parametrize("policy", [*POLICIES, "aggressive", "bf16-pure"])
@pytest.mark.parametrize("bad", [False, True])
def test_asking_changes_nothing_even_between_two_backward_passes(net, batch, step, policy, bad):
    run, loss_of = net(policy, ema_decay=0.9)
    for seed in range(3):
        step(run, loss_of, [batch(seed)])
    with run.autocast():
        loss = loss_of(batch(4))
    run.backward(loss)
    before = everything(run)
    x, y = batch(5)
    x = x * 1e30 if bad else x
    verdict = nc.explain(run, [(x, y)], loss_of)
    assert (verdict is not None) is bad
    assert_same(before, everything(run))


@pytest.mark.parametrize("policy", [*POLICIES, "aggressive"])
@pytest.mark.parametrize("first_is_bad", [False, True])
def test_a_run_that_asks_is_the_run_that_does_not_bit_for_bit(
    net, batch, step, policy, first_is_bad
):
    ends = []
    for asks in (False, True):
        run, loss_of = net(policy, ema_decay=0.9)
        torch.manual_seed(7)
        for seed in range(8):
            x, y = batch(seed)
            is_bad = seed in ((0, 1) if first_is_bad else (4, 5))
            factor = math.inf if is_bad else 1.0
            run.model.between = partial(torch.mul, torch.tensor(factor))
            given = [(x, y), batch(seed + 20)]
            outcome = step(run, loss_of, given)
            assert outcome.applied is not is_bad
            if asks and seed in (0, 4, 6):
                nc.explain(run, given, loss_of, loss_scale=outcome.loss_scale)
        ends.append(everything(run))
    assert_same(*ends)


def test_an_error_in_the_loss_leaves_no_hook_and_no_gradient_behind(net, batch):
    run, loss_of = net("fp8-delayed")
    before = everything(run)

    def broken(each):
        loss_of(each)
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        nc.explain(run, [batch()], broken)
    assert_same(before, everything(run))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
    assert not any(p._backward_hooks for p in run.model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_a_compiled_model_is_replayed_in_eager_mode_and_not_compiled_again(net, batch, step):
    run, loss_of = net("bf16")
    for block in run.model.blocks:
        block.compile(backend="aot_eager")
    counters = torch._dynamo.utils.counters
    step(run, loss_of, [batch()])
    compiled = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        run.model.blocks[1].down.weight[0, 0] = math.inf
    verdict = nc.explain(run, [batch()], loss_of)
    with torch.no_grad():
        run.model.blocks[1].down.weight[0, 0] = 0.0
    assert (verdict.module, verdict.role) == ("blocks.1.down", "weight")
    assert step(run, loss_of, [batch()]).applied
    assert counters["stats"]["unique_graphs"] == compiled > 0


@pytest.mark.parametrize("batch", [torch.ones(2, 4), {"x": torch.ones(2, 4)}])
def test_a_batch_that_is_not_in_a_list_raises(batch):
    model = nn.Linear(4, 2)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")
    with pytest.raises(nc.errors.ConfigError, match=r"as a list, got .*\[batch\]"):
        nc.explain(run, batch, lambda one: model(one).sum())
