"""Contenders that run on a CPU take the same steps, as their losses show."""

import pytest
import torch

from narrowcast.bench.model import set_up
from narrowcast.bench.peers import build_ours, build_torch
from narrowcast.workloads import load_recipe

STEPS = 4


def losses(build, recipe):
    trial = build(set_up(recipe))
    values = []
    for _ in range(STEPS):
        trial.step()
        values.append(trial.loss())
    return values


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ours_learns_a_language_model_as_plain_torch_does(accumulate, tiny):
    words = [
        f"gradient_accumulation_steps={accumulate}",
        "lr_schedule.name=cosine",
        "lr_schedule.warmup=2",
    ]
    recipe = load_recipe(tiny, words).recipe
    expected = losses(lambda bench: build_torch(bench, compute="fp32"), recipe)
    assert expected[-1] != expected[0]
    # AdamW divides by the root of a square: a last bit of a gradient may become a whole update of
    # lr in the first steps, of which a loss sees a share.
    mine = losses(lambda bench: build_ours(bench, policy="fp32"), recipe)
    assert mine == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ours_learns_any_task_as_plain_torch_does(accumulate, waves):
    recipe = waves(gradient_accumulation_steps=accumulate)
    expected = losses(lambda bench: build_torch(bench, compute="fp32"), recipe)
    assert expected[-1] != expected[0]
    # AdamW may turn the last bit of a gradient into a whole update, as above.
    mine = losses(lambda bench: build_ours(bench, policy="fp32"), recipe)
    assert mine == pytest.approx(expected, rel=1e-3)


def test_the_loss_of_any_task_is_compiled_with_its_model(waves):
    bench = set_up(waves())
    compiled = torch.compile(bench.model_with_loss(), backend="eager", fullgraph=True)
    expected = bench.task.loss(bench.model, bench.batches[0])
    torch.testing.assert_close(compiled(bench.batches[0]), expected)


def test_before_its_first_step_a_trial_has_no_loss(tiny):
    trial = build_torch(set_up(load_recipe(tiny).recipe), compute="fp32")
    assert trial.loss() is None
