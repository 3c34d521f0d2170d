import pytest
import torch

import narrowcast as nc
from narrowcast.hardware.catalog import named_hardware
from narrowcast.runner.achieved import achieved_line, flops_per_item
from narrowcast.workloads import build_task

SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "data.length=16", "batch_size=4"]


@pytest.fixture(scope="module")
def small():
    recipe = nc.load_recipe("quickstart", SMALL).recipe
    return recipe, build_task(recipe, device=torch.device("cpu"))


def test_flops_are_those_of_the_products_and_of_attention(small):
    recipe, task = small
    linear = sum(m.weight.numel() for m in task.model.modules() if isinstance(m, torch.nn.Linear))
    attention = 2 * 2 * 2 * 16 * 32  # layers, products, FLOPs per multiplication, length, width
    per_token = flops_per_item(recipe, task)
    # Kernels of attention differ in what they compute again in the backward pass.
    assert 6 * linear + 2.5 * attention <= per_token <= 6 * linear + 4 * attention


def test_the_line_has_a_share_only_where_the_peak_rate_is_known(small):
    recipe, task = small
    flops = flops_per_item(recipe, task)
    rates = [1.0, 1.0, 1.0, 9e9 / flops, 10e9 / flops, 11e9 / flops]
    here = achieved_line(recipe, task, nc.plan(task.model, "bf16"), rates)
    assert here.startswith("10 GFLOP/s of model FLOPs in the median step; the peak rate of")
    there = nc.plan(task.model, "bf16", hardware=named_hardware("h200"))
    rates = [1.0] * 3 + [494.7e12 / flops]
    line = achieved_line(recipe, task, there, rates)
    assert line.startswith("50.0% of possible: 495 TFLOP/s")
    assert line.endswith("of 989.4 TFLOP/s in bf16")
    assert achieved_line(recipe, task, there, [1.0]) == ""  # no step after the warm-up
