"""`epochs` in place of `steps`: how many steps that are, and which of the two is right."""

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from narrowcast.config.limits import UNSETTLED
from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe

TEXT = "workload: tutorial\nbatch_size: 2\n"


@pytest.fixture
def recipe(tmp_path):
    def load(length, *words):
        path = tmp_path / "mine.yaml"
        path.write_text(f"{TEXT}{length}")
        return load_recipe(path, words)

    return load


@given(
    samples=integers(1, 200), batch=integers(1, 9), accumulate=integers(1, 5), epochs=integers(1, 4)
)
def test_epochs_are_as_many_samples_and_less_than_a_step_more(samples, batch, accumulate, epochs):
    words = [f"epochs={epochs}", f"batch_size={batch}", f"gradient_accumulation_steps={accumulate}"]
    found = load_recipe("tutorial", words).recipe.for_samples(samples)
    step = batch * accumulate
    assert 0 <= found.steps * step - epochs * samples < step
    assert found.is_settled
    assert found.epochs == epochs


def test_steps_are_open_until_the_data_is_known(recipe):
    loaded = recipe("epochs: 3")
    assert not loaded.recipe.is_settled
    settled = loaded.for_samples(9)
    assert settled.resolved()["steps"] == {"value": 14, "origin": "epochs"}
    assert settled.resolved()["epochs"] == {"value": 3, "origin": "mine.yaml"}
    assert settled.for_samples(1000).recipe.steps == 14  # settled is settled


def test_a_recipe_with_steps_has_those_whatever_the_data(recipe):
    loaded = recipe("steps: 7")
    assert loaded.recipe.is_settled
    assert loaded.for_samples(9).recipe.steps == 7


@pytest.mark.parametrize(
    ("length", "words", "steps", "epochs"),
    [
        ("epochs: 3", ["steps=20"], 20, None),
        ("steps: 20", ["epochs=2"], UNSETTLED, 2),
        ("steps: 20\nepochs: null", [], 20, None),
        ("epochs: 3", ["epochs=4"], UNSETTLED, 4),
        ("steps: 20", ["epochs=none"], 20, None),
    ],
)
def test_the_last_who_says_how_long_a_run_is_is_right(recipe, length, words, steps, epochs):
    found = recipe(length, *words).recipe
    assert (found.steps, found.epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("length", "words", "message"),
    [
        ("steps: 20\nepochs: 3", [], "mine.yaml:4: epochs: steps and epochs are both set"),
        ("", ["steps=20", "epochs=3"], "epochs=3: steps and epochs are both set"),
        ("", [], "steps: not set. Write steps=VALUE"),
        ("epochs: 3", ["epochs=none"], "steps: not set"),
        ("epochs: 0", [], "epochs: must be at least 1"),
        ("epochs: 1.5", [], "epochs: must be a whole number"),
        ("epochs: 9999999", [], "must be at most 1000000"),
    ],
)
def test_both_none_and_nonsense_are_refused(recipe, length, words, message):
    with pytest.raises(ConfigError) as caught:
        recipe(length, *words)
    assert message in str(caught.value)


def test_what_does_not_fit_so_many_steps_is_said_once_they_are_known(recipe):
    schedule = "precision: {schedule: [{policy: bf16, until: 50}, {policy: fp32}]}"
    found = recipe(f"epochs: 3\n{schedule}").recipe
    assert found.for_samples(100).steps == 150
    with pytest.raises(ConfigError, match="epochs=3 are 14 steps here: phase 1 would end"):
        found.for_samples(9)


def test_more_steps_than_a_run_may_have_are_said(recipe):
    with pytest.raises(ConfigError, match="must give 1 to"):
        recipe("epochs: 1000000").recipe.for_samples(10**9)
