"""A jump is kept only where the loss fell beyond chance; else every bit stays."""

import copy
import math
import random

import pytest
import scipy.stats
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.precision.nested import tensors_in
from narrowcast.strategies.hybrid.jumper import RISK, Jumper, judge, student_quantile

BEFORE = [2.0 + 0.1 * i for i in range(8)]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
POLICIES = [
    "fp32", "fp16", "bf16,params=fp32", "fp8-delayed", "bf16,params=bf16,master=split",
    "bf16,params=bf16,master=fp32", "bf16,params=bf16,master=kahan",
    "bf16,params=bf16,master=stochastic", "bf16,params=bf16,master=none",
]  # fmt: skip


def test_a_loss_that_fell_everywhere_is_accepted():
    result = judge(BEFORE, [b - 0.1 - 0.001 * i for i, b in enumerate(BEFORE)])
    assert result.accepted
    assert result.gain == pytest.approx(0.1035)


def test_a_mean_that_one_batch_made_is_not_accepted():
    result = judge(BEFORE, [*BEFORE[:-1], BEFORE[-1] - 1])
    assert not result.accepted
    assert result.gain == pytest.approx(1 / 8)
    assert "no more than the" in result.why


def test_a_loss_that_stayed_is_not_accepted():
    assert not judge(BEFORE, BEFORE).accepted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_is_not_accepted(bad):
    result = judge(BEFORE, [bad, *(b - 1 for b in BEFORE[1:])])
    assert not result.accepted
    assert result.why == "a loss is not finite"


@given(
    fell=st.lists(st.integers(-64, 64), min_size=8, max_size=20).filter(lambda f: len(set(f)) > 1)
)
def test_it_is_the_paired_test_of_scipy_one_sided(fell):
    before, after = [0.0] * len(fell), [-f / 64 for f in fell]
    tested = scipy.stats.ttest_rel(before, after, alternative="greater")
    risk = RISK / 2  # whole and half
    assume(not 0.93 * risk < tested.pvalue < 1.07 * risk)  # what the quantile is right to
    assert judge(before, after).accepted == (tested.pvalue < risk)


@pytest.mark.parametrize("probability", [0.9, 0.95, 0.95 + 0.1 / 3, 0.99])
@pytest.mark.parametrize("freedom", [7, 15, 63])
def test_the_quantile_is_that_of_students_t(probability, freedom):
    expected = scipy.stats.t.ppf(probability, freedom)
    assert student_quantile(probability, freedom=freedom) == pytest.approx(expected, rel=0.02)


def test_of_jumps_that_do_nothing_few_are_accepted():
    draw = random.Random(0).gauss
    accepted = 0
    for _ in range(2000):
        before = [draw(0, 1) for _ in range(8)]
        tries = ([b + draw(0, 0.1) for b in before] for _ in range(2))
        accepted += any(judge(before, after).accepted for after in tries)
    assert accepted <= 2000 * RISK + 30  # three standard deviations


@pytest.mark.parametrize(("before", "after"), [(1, 1), (7, 7), (8, 9)])
def test_fewer_than_eight_pairs_raise(before, after):
    with pytest.raises(ConfigError, match=f"got {before} before and {after} after"):
        judge([1.0] * before, [0.5] * after)


def prepared(policy, **settings):
    """Return a small prepared model, with dropout and a batch norm."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 4)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return nc.prepare(net, optimizer, policy=policy, emulate=True, **settings)


def train(run, steps, *, first=0, jumper=None):
    for step in range(first, first + steps):
        with run.autocast():
            loss = (run.model(X * (1 + step % 3)).float() - 1).square().mean()
        run.step(loss)
        if jumper is not None:
            jumper.observe(step + 1)
    return run


def jumper_of(run, *, budget=1e6):
    return Jumper(run, every=1, budget=budget)


def bits(run):
    return [t.detach().clone() for t in tensors_in(run.state_dict())]


def weights(run):
    return [run.engine.weights.full(p).clone() for p in run.engine.weights.all]


def compare(jumper, *, before, after):
    """Compare eight micro-batches whose mean losses are these; return what was decided."""
    means = [after, before]  # the present weights come last

    def compute():
        mean = means.pop(0)
        return torch.tensor([[mean + 0.001 * i] for i in range(8)])

    jumper.compare(compute)
    return jumper.decide()


def test_a_jump_that_helps_is_kept_with_the_moments_as_they_are():
    run = prepared("bf16,params=bf16,master=split")
    jumper = jumper_of(run)
    train(run, 6, jumper=jumper)
    moments = copy.deepcopy(run.optimizer.state_dict()["state"])
    start, deltas = weights(run), jumper.history.predict(20)
    jumper.begin(20)
    result = compare(jumper, before=2.0, after=1.0)
    assert (result.accepted, result.scale) == (True, 1.0)
    assert result.gain == pytest.approx(1.0)
    for now, then, delta in zip(weights(run), start, deltas, strict=True):
        assert torch.equal(now, then + delta)
    after = run.optimizer.state_dict()["state"]
    assert all(map(torch.equal, tensors_in(after), tensors_in(moments)))
    assert jumper.account.accepted == 1
    assert (jumper.account.spent, jumper.account.wasted) == (17, 0)


def test_half_of_a_jump_that_is_rejected_can_be_accepted():
    run = prepared("fp32")
    jumper = jumper_of(run)
    train(run, 6, jumper=jumper)
    start, deltas = weights(run), jumper.history.predict(20)
    jumper.begin(20)
    assert not compare(jumper, before=2.0, after=3.0).accepted
    assert all(map(torch.equal, weights(run), start))
    assert (jumper.account.tried, jumper.account.wasted) == (0, 17)
    jumper.begin(20, scale=0.5)
    result = compare(jumper, before=2.0, after=1.0)
    assert (result.accepted, result.scale) == (True, 0.5)
    for now, then, delta in zip(weights(run), start, deltas, strict=True):
        assert torch.equal(now, torch.add(then, delta, alpha=0.5))
    assert (jumper.account.tried, jumper.account.spent, jumper.account.wasted) == (1, 33, 17)


def test_the_line_is_followed_further_after_an_accepted_jump():
    run = prepared("fp32")
    jumper = jumper_of(run)
    train(run, 6, jumper=jumper)
    start, deltas = weights(run), jumper.history.predict(20)
    for _ in range(2):
        jumper.begin(20)
        assert compare(jumper, before=2.0, after=1.0).accepted
    for now, then, delta in zip(weights(run), start, deltas, strict=True):
        assert torch.equal(now, (then + delta) + delta)


@pytest.mark.parametrize("policy", POLICIES)
def test_comparisons_and_rejected_jumps_leave_every_bit(policy):
    plain, jumping = train(prepared(policy, ema_decay=0.9), 12), prepared(policy, ema_decay=0.9)
    jumper, seen = jumper_of(jumping), []

    def compute():
        with jumping.autocast():  # draws random numbers, and moves the batch norm
            noise = torch.rand(8, 1)
            jumping.model(torch.randn(4, 16))
        seen.append(noise)
        return noise

    addresses = [p.data_ptr() for p in jumping.model.parameters()]
    for step in range(12):
        train(jumping, 1, first=step, jumper=jumper)
        if step > 5 and len(jumper.history) > 2:
            for scale in (1.0, 0.5):
                jumper.begin(3, scale=scale)
                jumper.compare(compute)
                assert not jumper.decide().accepted
    assert jumper.account.rejections == 5
    assert all(map(torch.equal, seen[0::2], seen[1::2]))  # the same noise for both
    assert all(map(torch.equal, bits(plain), bits(jumping)))
    assert [p.data_ptr() for p in jumping.model.parameters()] == addresses


def test_losses_that_raise_leave_the_weights_as_they_were():
    run = prepared("fp32")
    jumper = jumper_of(run)
    train(run, 6, jumper=jumper)
    jumper.begin(20)
    before = bits(run)

    def compute():
        assert not all(map(torch.equal, bits(run), before))  # the predicted weights
        raise StopIteration

    with pytest.raises(StopIteration):
        jumper.compare(compute)
    assert all(map(torch.equal, bits(run), before))


def test_rejected_jumps_alone_use_up_the_budget():
    run = prepared("fp32")
    jumper = jumper_of(run, budget=34)
    train(run, 6, jumper=jumper)
    for _ in range(3):
        jumper.begin(20)
        assert compare(jumper, before=2.0, after=1.0).accepted
    assert jumper.refusal() == ""
    jumper.begin(20)
    assert not compare(jumper, before=2.0, after=3.0).accepted
    assert jumper.refusal() == "a rejected jump costs 33 forward passes, and 17 are left"


def test_after_five_rejections_nothing_is_predicted_and_no_weights_are_kept():
    run = prepared("fp32")
    jumper = jumper_of(run)
    train(run, 6, jumper=jumper)
    for _ in range(5):
        jumper.begin(2, scale=0.5)
        compare(jumper, before=1.0, after=1.0)
    train(run, 1, first=6, jumper=jumper)
    assert len(jumper.history) == 0
    assert jumper.refusal() == "5 jumps in a row were rejected"


def test_a_jumper_restored_between_comparisons_continues_bit_for_bit():
    runs = [prepared("fp32"), prepared("fp32")]
    first, second = map(jumper_of, runs)
    train(runs[0], 6, jumper=first)
    first.begin(20)
    first.compare(lambda: torch.linspace(0, 1, 5).reshape(5, 1))
    runs[1].load_state_dict(runs[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    results = []
    for jumper in (first, second):
        losses = iter([torch.zeros(5, 1), torch.linspace(1, 2, 5).reshape(5, 1)])
        jumper.compare(lambda losses=losses: next(losses))
        results.append(jumper.decide())
    assert results[0].accepted
    assert results[0] == results[1]
    assert all(map(torch.equal, bits(runs[0]), bits(runs[1])))
    assert first.account == second.account


def test_averages_are_not_taken_for_weights():
    run = prepared("fp32", ema_decay=0.9)
    jumper = jumper_of(train(run, 2))
    with run.use_ema(), pytest.raises(ConfigError, match="a jump was called inside"):
        jumper.observe(1)
