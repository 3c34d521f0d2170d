"""Every peer that can run on a CPU takes the same steps: the losses say so."""

import inspect

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from narrowcast.bench.contenders import Contender
from narrowcast.bench.linear import layer_builder
from narrowcast.bench.model import set_up
from narrowcast.bench.peers import debugged, ours, plain, watched
from narrowcast.bench.products import shapes_from
from narrowcast.workloads import load_recipe

STEPS = 4
BUILDS = {
    "ours": lambda bench: ours.build(bench, policy="fp32"),
    "watched": lambda bench: watched.build(bench, policy="fp32", meter_every=1, ema_decay=0.9),
    "eager": lambda bench: debugged.build(bench, watch="nothing"),
}


def losses(build, recipe):
    trial = build(set_up(recipe))
    step = trial.cases["step"].open()
    found = []
    for _ in range(STEPS):
        step()
        found.append(trial.loss())
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", BUILDS)
def test_a_contender_learns_what_plain_torch_learns(name, accumulate, tiny):
    words = [f"accumulate={accumulate}", "lr_schedule.name=cosine", "lr_schedule.warmup=2"]
    recipe = load_recipe(tiny, words).recipe
    expected = losses(lambda bench: plain.build(bench, compute="fp32", compiled=False), recipe)
    assert expected[-1] != expected[0]
    # AdamW divides by the root of a square: a last bit of a gradient may become a whole update of
    # lr in the first steps, of which a loss sees a share.
    assert losses(BUILDS[name], recipe) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", BUILDS)
def test_any_task_is_learnt_as_plain_torch_learns_it(name, accumulate, waves):
    recipe = waves(accumulate=accumulate)
    expected = losses(lambda bench: plain.build(bench, compute="fp32", compiled=False), recipe)
    assert expected[-1] != expected[0]
    # AdamW may turn the last bit of a gradient into a whole update, as above.
    assert losses(BUILDS[name], recipe) == pytest.approx(expected, rel=1e-3)


def test_the_loss_of_any_task_is_compiled_with_its_model(waves):
    bench = set_up(waves())
    compiled = torch.compile(bench.model_with_loss(), backend="eager", fullgraph=True)
    expected = bench.task.loss(bench.model, bench.batches[0])
    torch.testing.assert_close(compiled(bench.batches[0]), expected)


def test_before_its_first_step_a_trial_has_no_loss(tiny):
    trial = plain.build(set_up(load_recipe(tiny).recipe), compute="fp32", compiled=False)
    assert trial.loss() is None
    assert trial.cases["step"].work == {"tokens": 32.0}


@pytest.mark.parametrize(
    "contender",
    [
        Contender(name="torch", kind="torch", options={"dtype": "fp32"}),
        Contender(name="ours", kind="narrowcast", options={"policy": "fp32", "compiled": False}),
    ],
    ids=lambda contender: contender.name,
)
def test_a_layer_is_three_products(contender):
    (shape,) = shapes_from("8x4x2")
    step = layer_builder(contender, device=torch.device("cpu"))(shape)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == shape.flops == 3 * 2 * 8 * 4 * 2


def test_a_weight_counts_as_changed_in_every_step():
    (shape,) = shapes_from("8x4x2")
    options = {"policy": "fp32", "compiled": False}
    ours = Contender(name="ours", kind="narrowcast", options=options)
    step = layer_builder(ours, device=torch.device("cpu"))(shape)
    names = inspect.getclosurevars(step).nonlocals
    weight = next(names["model"].parameters())
    before = weight._version
    step()
    assert weight._version == before + 1
