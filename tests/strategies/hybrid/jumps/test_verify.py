"""A jump is kept only where the loss fell beyond chance, and else never was."""

import math
import random

import pytest
import scipy.stats
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.verify import Trial, decide, quantile

BEFORE = [2.0 + 0.1 * i for i in range(8)]


def test_a_loss_that_fell_everywhere_is_accepted():
    verdict = decide(BEFORE, [b - 0.1 - 0.001 * i for i, b in enumerate(BEFORE)])
    assert verdict.accepted
    assert verdict.gain == pytest.approx(0.1035)


def test_a_mean_that_one_batch_made_is_not():
    after = [*BEFORE[:-1], BEFORE[-1] - 1]
    verdict = decide(BEFORE, after)
    assert not verdict.accepted
    assert verdict.gain == pytest.approx(1 / 8)
    assert "no more than the" in verdict.why


def test_a_loss_that_stayed_is_not_accepted():
    assert not decide(BEFORE, BEFORE).accepted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_not_accepted(bad):
    verdict = decide(BEFORE, [bad, *(b - 1 for b in BEFORE[1:])])
    assert not verdict.accepted
    assert verdict.why == "a loss is not finite"


@given(
    fell=st.lists(st.integers(-64, 64), min_size=8, max_size=20).filter(lambda f: len(set(f)) > 1),
    risk=st.sampled_from([0.01, 0.05, 0.1]),
)
def test_it_is_the_paired_test_of_scipy_one_sided(fell, risk):
    before, after = [0.0] * len(fell), [-f / 64 for f in fell]
    tested = scipy.stats.ttest_rel(before, after, alternative="greater")
    assume(not 0.93 * risk < tested.pvalue < 1.07 * risk)  # what the quantile is right to
    assert decide(before, after, risk=risk).accepted == (tested.pvalue < risk)


@pytest.mark.parametrize("probability", [0.9, 0.95, 0.95 + 0.1 / 3, 0.99])
@pytest.mark.parametrize("freedom", [7, 15, 63])
def test_the_quantile_is_that_of_students_t(probability, freedom):
    expected = scipy.stats.t.ppf(probability, freedom)
    assert quantile(probability, freedom=freedom) == pytest.approx(expected, rel=0.02)


def test_of_jumps_that_do_nothing_few_are_accepted_also_when_three_are_tried():
    draw = random.Random(0).gauss
    accepted = 0
    for _ in range(2000):
        before = [draw(0, 1) for _ in range(8)]
        tries = ([b + draw(0, 0.1) for b in before] for _ in range(3))
        accepted += any(decide(before, after, candidates=3).accepted for after in tries)
    # Two thousand draws of a risk of 0.05: a standard deviation is 10.
    assert accepted <= 2000 * 0.05 + 30


@pytest.mark.parametrize("count", [1, 7])
def test_fewer_than_eight_pairs_are_refused(count):
    with pytest.raises(RecipeError, match="takes 8 or more pairs"):
        decide([1.0] * count, [0.5] * count)


def test_losses_of_other_batches_are_refused():
    with pytest.raises(RecipeError, match="8 losses before and 9 after"):
        decide(BEFORE, [*BEFORE, 1.0])


def test_a_trial_moves_from_where_it_began_at_every_scale(listed, randn):
    start, delta = randn(5), randn(5)
    access = listed([start.clone()])
    with Trial(access, [delta]) as trial:
        for scale in (1.0, 0.5, 0.25):
            trial.jump(scale)
            assert torch.equal(access.weights[0], torch.add(start, delta, alpha=scale))
    assert torch.equal(access.weights[0], start)


def test_a_trial_that_is_kept_stays(listed, randn):
    start, delta = randn(5), randn(5)
    access = listed([start.clone()])
    with Trial(access, [delta]) as trial:
        trial.jump(0.5)
        trial.keep()
    assert torch.equal(access.weights[0], start + delta / 2)


def test_a_trial_that_raises_is_rolled_back_even_if_it_was_to_be_kept(listed, randn):
    start = randn(5)
    access = listed([start.clone()])

    def fail():
        with Trial(access, [randn(5)]) as trial:
            trial.jump(1)
            trial.keep()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert torch.equal(access.weights[0], start)


def test_a_trial_tells_its_bytes(listed):
    with Trial(listed([torch.zeros(5)]), [torch.zeros(5)]) as trial:
        assert trial.bytes() == 20
