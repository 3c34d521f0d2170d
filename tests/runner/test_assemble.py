import pytest
import torch

from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Hardware, detect_hardware
from narrowcast.runner.assemble import assemble, planned
from narrowcast.training.optimizers import build_optimizer
from narrowcast.workloads import build_task, load_recipe

OPTIMIZERS = [
    ["optimizer.name=adamw"],
    ["optimizer.name=adam"],
    ["optimizer.name=sgd"],
    ["optimizer.name=sgd", "optimizer.momentum=0.9"],
    ["optimizer.name=rmsprop"],
    ["optimizer.name=rmsprop", "optimizer.momentum=0.9"],
]


@pytest.mark.parametrize("words", OPTIMIZERS, ids=" ".join)
def test_moments_are_counted_as_torch_keeps_them(tiny, words):
    recipe = load_recipe(tiny, [*words, "precision.policy=fp32"]).recipe
    model = build_task(recipe, device=torch.device("cpu")).model
    optimizer = build_optimizer(recipe.optimizer, model, device=torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0  # not the count of steps
    )
    assert planned(recipe, detect_hardware("cpu"))[0].bytes["moments"] == kept


def test_the_plan_that_is_carried_out_is_the_one_that_is_printed(tiny):
    recipe = load_recipe(tiny, ["precision.policy=fp8-row"]).recipe
    assert assemble(recipe).prepared.plan == planned(recipe, detect_hardware("cpu"))[0]


def test_the_settings_of_the_loss_scale_reach_the_scale(tiny):
    words = [
        f"precision.loss_scale.{word}" for word in ("init_scale=1024", "scale_groups=[blocks.0]")
    ]
    prepared = assemble(load_recipe(tiny, words).recipe).prepared
    assert prepared.state_dict()["scales"]["losses"]["loss"]["value"].item() == 1024


def test_planning_on_a_device_that_is_not_here_needs_no_such_device(tiny):
    there = Hardware(device="cuda:7", name="a large GPU", memory_bytes=2**40)
    assert planned(load_recipe(tiny).recipe, there)[0].hardware is there


def test_products_that_must_not_be_emulated_are_refused_where_there_are_none(tiny):
    recipe = load_recipe(tiny, ["precision.policy=compute=e4m3", "precision.emulate=false"]).recipe
    with pytest.raises(UnsupportedError, match="Leave out emulate=false"):
        assemble(recipe)
