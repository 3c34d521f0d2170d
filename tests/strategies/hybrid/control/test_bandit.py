import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.control.bandit import (
    CONTEXT,
    HOLD,
    Arm,
    Bandit,
    arms,
    context,
    worth,
)
from narrowcast.strategies.hybrid.control.features import FeatureWindow

ARMS = arms(["line", "average"], [5, 20])


def play(bandit, steps, reward, *, seed=0, facts=None):
    """Return the bandit and the arms it chose; `reward` is of an arm and a context."""
    rng, chosen = np.random.default_rng(seed), []
    for step in range(steps):
        x = [1.0, float(rng.uniform(-1, 1))] if facts is None else facts(step)
        arm = bandit.choose(x).arm
        value = 0.0 if arm == HOLD else reward(arm, x) + 0.3 * rng.normal()
        bandit = bandit.after(arm, x, reward=value)
        chosen.append((arm, x))
    return bandit, chosen


def test_it_tries_before_it_holds():
    choice = Bandit.new(ARMS, facts=2).choose([1.0, 0.0])
    assert choice.arm == ARMS[0]
    assert (choice.expected, choice.bonus) == (0.0, 1.0)


def test_where_no_jump_pays_it_learns_to_hold():
    bandit, chosen = play(Bandit.new(ARMS, facts=2), 400, lambda arm, _: -arm.horizon / 10)
    held = [arm == HOLD for arm, _ in chosen]
    assert np.mean(held[100:]) > 0.9
    assert bandit.held == sum(held)


def test_it_finds_the_one_jump_that_pays():
    best = Arm("average", 5)
    _, chosen = play(Bandit.new(ARMS, facts=2), 400, lambda arm, _: 2.0 if arm == best else -1.0)
    assert np.mean([arm == best for arm, _ in chosen[100:]]) > 0.9


def test_it_jumps_where_jumps_pay_and_holds_where_they_do_not():
    _, chosen = play(Bandit.new(ARMS, facts=2), 1200, lambda _, x: 3 * x[1])
    late = chosen[300:]
    where = [x[1] for _, x in late]
    jumped = [arm != HOLD for arm, _ in late]
    assert np.mean([j for j, x in zip(jumped, where, strict=True) if x > 0.3]) > 0.95
    assert np.mean([j for j, x in zip(jumped, where, strict=True) if x < -0.3]) < 0.1


def test_it_comes_back_to_a_jump_that_begins_to_pay():
    bandit = Bandit.new(ARMS, facts=2, memory=50)
    bandit, _ = play(bandit, 200, lambda *_: -2.0, facts=lambda _: [1.0, 0.0])
    _, chosen = play(bandit, 400, lambda *_: 2.0, facts=lambda _: [1.0, 0.0])
    assert np.mean([arm != HOLD for arm, _ in chosen[200:]]) > 0.9


def test_what_an_arm_is_thought_worth_is_a_ridge_regression():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    bandit = Bandit.new(ARMS, facts=3, memory=1e15, ridge=2.0, exploration=0.7)
    for row, value in zip(x, y, strict=True):
        bandit = bandit.after(ARMS[2], row, reward=value)
    here = rng.normal(size=3)
    choice = bandit.choices(here)[2]
    fitted = Ridge(alpha=2.0, fit_intercept=False).fit(x, y)
    assert choice.expected == pytest.approx(fitted.predict(here[None])[0], rel=1e-9)
    inverse = np.linalg.inv(x.T @ x + 2 * np.eye(3))
    assert choice.bonus == pytest.approx(0.7 * math.sqrt(here @ inverse @ here), rel=1e-9)
    assert bandit.counts == (0, 0, 30, 0)


def test_playing_leaves_the_bandit_it_was_played_on_alone():
    bandit = Bandit.new(ARMS, facts=2)
    before = bandit.state_dict()
    bandit.after(ARMS[0], [1.0, 1.0], reward=5.0)
    assert torch.equal(bandit.matrices, before["matrices"])
    assert torch.equal(bandit.responses, before["responses"])


def test_a_restored_bandit_chooses_the_same():
    bandit, _ = play(Bandit.new(ARMS, facts=2), 50, lambda arm, x: x[1] * arm.horizon)
    again = Bandit.new(ARMS, facts=2).restored(bandit.state_dict())
    for x in np.linspace(-1, 1, 9):
        assert again.choices([1.0, x]) == bandit.choices([1.0, x])
    assert play(again, 20, lambda *_: 1.0)[1] == play(bandit, 20, lambda *_: 1.0)[1]


def test_it_stays_on_the_cpu_wherever_the_model_is():
    with torch.device("meta"):
        bandit, _ = play(Bandit.new(ARMS, facts=2), 5, lambda *_: 1.0)
    assert bandit.matrices.device.type == "cpu"


def test_a_state_of_other_arms_is_refused():
    state = Bandit.new(ARMS, facts=2).state_dict()
    with pytest.raises(CheckpointError, match="write the predictors and horizons it had"):
        Bandit.new(ARMS[:3], facts=2).restored(state)


@pytest.mark.parametrize("bad", [[], [HOLD], [ARMS[0], ARMS[0]]])
def test_arms_that_are_no_choice_are_refused(bad):
    with pytest.raises(RecipeError, match="leave out to hold"):
        Bandit.new(bad)


@pytest.mark.parametrize("bad", [{"exploration": -1.0}, {"ridge": 0.0}, {"memory": 0.0}])
def test_a_bandit_that_cannot_learn_is_refused(bad):
    with pytest.raises(RecipeError, match="a bandit needs"):
        Bandit.new(ARMS, **bad)


@pytest.mark.parametrize("bad", [[1.0], [1.0, math.nan]])
def test_facts_that_are_none_are_refused(bad):
    with pytest.raises(RecipeError, match="a bandit of 2 facts"):
        Bandit.new(ARMS, facts=2).choose(bad)


def test_an_arm_that_is_none_is_refused():
    with pytest.raises(RecipeError, match="play one that `choose` returned"):
        Bandit.new(ARMS, facts=2).after(Arm("other", 3), [1.0, 0.0], reward=1.0)


def test_a_forward_pass_costs_a_third_of_a_step():
    assert worth(steps_gained=4.0, forwards=6, predictor_steps=0.5) == 1.5
    assert worth(steps_gained=0.0, forwards=3) == -1.0


def test_a_context_has_its_facts_in_bounds():
    window = FeatureWindow()
    for step in range(100):
        window = window.after(10.0 - step / 20)
    facts = context(window, score=0.8, total=3.0)
    assert len(facts) == len(CONTEXT)
    assert all(-1 <= fact <= 1 for fact in facts)
    assert facts[2] < 0
