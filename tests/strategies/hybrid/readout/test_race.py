"""Read-outs are told apart on the same batches, and on no more of them than it takes."""

import itertools
import math
import random
from statistics import fmean

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.strategies.hybrid.readout.race import RISK, race

NAMES = ("trained", "average 0.015", "average 0.05")


def raced(losses, *, passes, better="lower", batches=None):
    """Race names whose loss on batch n is the n-th of theirs."""
    count = len(next(iter(losses.values())))
    return race(
        list(losses),
        lambda name, chunk: [losses[name][n] for n in chunk],
        batches=range(count) if batches is None else batches,
        passes=passes,
        better=better,
    )


def noisy(apart, *, count=200, seed=0):
    """Losses that vary much from batch to batch, and little between names beside `apart`."""
    drawn = random.Random(seed)
    shared = [drawn.gauss(2, 1) for _ in range(count)]
    return {
        name: [each + by + drawn.gauss(0, 0.05) for each in shared]
        for name, by in zip(NAMES, apart, strict=True)
    }


def test_one_that_is_clearly_ahead_ends_it_after_eight_batches():
    losses = noisy((0.0, -0.5, 0.3))
    found = raced(losses, passes=600)
    assert list(found.left) == ["average 0.015"]
    assert found.batches == dict.fromkeys(NAMES, 8)
    assert found.passes == 24
    # By the losses alone, eight of them would not have told.
    unpaired = scipy.stats.ttest_ind(losses["trained"][:8], losses["average 0.015"][:8])
    assert unpaired.pvalue > RISK


def test_what_one_that_fell_behind_would_have_cost_is_left_to_the_others():
    found = raced(noisy((0.0, 0.0, 0.5)), passes=60)
    assert found.batches["average 0.05"] == 8
    # 60 passes less the 24 of the first round, by two.
    assert found.batches["trained"] == found.batches["average 0.015"] == 8 + 18


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_batch_that_is_no_number_with_any_tells_nothing(bad):
    losses = noisy((0.1, -0.1, 0.2), count=6)
    spoilt = {name: [bad, *each[:3], bad, *each[3:]] for name, each in losses.items()}
    found = raced(spoilt, passes=600)
    assert found.seen == losses
    assert found.passes == 3 * 8
    # Not even where there is nothing left to spend.
    assert raced(spoilt, passes=0).batches == dict.fromkeys(NAMES, 1)
    assert raced(spoilt, passes=0).means()["trained"] == losses["trained"][0]


def test_where_no_batch_is_a_number_that_is_what_is_told():
    found = raced({name: [math.nan] * 3 for name in NAMES}, passes=600)
    assert all(math.isnan(each) for each in found.means().values())
    # A run that has diverged is not looked at for ever.
    endless = race(NAMES, lambda _, chunk: [math.nan] * len(chunk), batches=itertools.count(),
                   passes=0, better="lower")  # fmt: skip
    assert endless.batches == dict.fromkeys(NAMES, 8)


def test_one_that_alone_is_no_number_is_behind():
    losses = noisy((0.1, -0.1, 0.2), count=8)
    losses["average 0.05"] = [math.nan] * 8
    assert "average 0.05" not in raced(losses, passes=600).left


@given(
    passes=st.floats(0, 200),
    names=st.integers(1, 5),
    count=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_no_more_is_spent_than_may_be_beyond_one_batch_each(passes, names, count, seed):
    drawn = random.Random(seed)
    losses = {str(n): [drawn.gauss(0, 1) for _ in range(count)] for n in range(names)}
    found = raced(losses, passes=passes)
    assert found.passes <= max(passes, names)
    assert all(found.seen[name] == losses[name][: len(found.seen[name])] for name in losses)
    assert all(1 <= found.batches[name] <= count for name in losses)
    # Those that are left have seen all that anybody has.
    assert {found.batches[name] for name in found.left} == {max(found.batches.values())}


@given(seed=st.integers(0, 999))
def test_one_is_dropped_where_the_paired_test_of_scipy_says_so(seed):
    losses = noisy((0.0, 0.02, 0.05), count=8, seed=seed)
    found = raced(losses, passes=24)
    best = min(losses, key=lambda name: fmean(losses[name]))
    for name in set(losses) - {best}:
        tested = scipy.stats.ttest_rel(losses[name], losses[best], alternative="greater")
        risk = RISK / 2
        if not 0.93 * risk < tested.pvalue < 1.07 * risk:  # what the quantile is right to
            assert (name in found.left) == (tested.pvalue >= risk)


def test_where_higher_is_better_the_others_are_dropped():
    losses = noisy((0.0, -0.5, 0.3))
    assert list(raced(losses, passes=600, better="higher").left) == ["average 0.05"]


def test_equals_are_compared_until_the_budget_is_spent():
    losses = {name: [1.0, 2.0] * 50 for name in NAMES}
    found = raced(losses, passes=100)
    assert (found.passes, list(found.left)) == (99, list(NAMES))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_that_is_no_number_is_dropped_at_once(bad):
    losses = noisy((0.0, 0.0, 0.0))
    losses["trained"] = [bad] * 200
    found = raced(losses, passes=9)
    assert set(found.left) == {"average 0.015", "average 0.05"}
    assert not any(map(math.isfinite, [found.scores("average 0.05")["trained"]]))


def test_all_stay_where_none_is_a_number():
    losses = {name: [math.inf, -math.inf] for name in NAMES}
    assert list(raced(losses, passes=6).left) == list(NAMES)


@given(seed=st.integers(0, 99), at=st.floats(-10, 10))
def test_scores_differ_by_what_was_seen_of_both(seed, at):
    losses = noisy((0.0, 0.01, 0.5), seed=seed)
    found = raced(losses, passes=90)
    chosen = found.left[0]
    scores = found.scores(chosen, at=at)
    assert scores[chosen] == at
    for name, count in found.batches.items():
        shared = min(count, found.batches[chosen])
        apart = fmean(losses[name][:shared]) - fmean(losses[chosen][:shared])
        assert scores[name] - at == pytest.approx(apart, abs=1e-12)


def test_batches_are_taken_as_they_are_needed():
    taken = itertools.count()
    endless = (next(taken) for _ in itertools.repeat(None))
    raced(noisy((0.0, -0.5, 0.3)), passes=600, batches=endless)
    assert next(taken) == 8


def test_no_batches_are_refused():
    with pytest.raises(ConfigError, match="at least one batch, got none"):
        raced({"trained": [1.0]}, passes=10, batches=[])
