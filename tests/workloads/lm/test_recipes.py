import pytest
import torch

from narrowcast.hardware.catalog import named_hardware
from narrowcast.runner.fitting import budget, predict
from narrowcast.workloads import build_task, load_recipe, shipped_recipes
from narrowcast.workloads.lm.task import build_language_model

# Measured by others with these models (the 124M is GPT-2 small's own name). Those of Llama 3 are
# the sums over the tensors of its published checkpoints.
PARAMETERS = {
    "quickstart": 1.0e6,
    "health/saturating": 1.0e6,
    "lm/gpt-124m": 124e6,
    "lm/gpt-350m": 406e6,
    "lm/gpt-1.3b": 1418e6,
    "lm/gpt-2.8b": 2836e6,
    "lm/llama-1b": 1_235_814_400,
    "lm/llama-3b": 3_212_749_824,
    "lm/llama-8b": 8_030_261_248,
}
NEAR = {"quickstart": 0.1, "health/saturating": 0.1}
NEAR |= dict.fromkeys(("lm/llama-1b", "lm/llama-3b", "lm/llama-8b"), 0)
FIT = {"lm/llama-1b": "rtx4090", "lm/llama-3b": "l40s", "lm/llama-8b": "h200"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_has_the_parameters_its_name_promises(name):
    task = build_task(load_recipe(name).recipe, device=torch.device("meta"))
    count = sum(parameter.numel() for parameter in task.model.parameters())
    assert count == pytest.approx(PARAMETERS[name], rel=NEAR.get(name, 0.005))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_recipe_is_listed_with_one_line(name):
    description = dict(shipped_recipes())[name]
    assert description
    assert "\n" not in description


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_suits_the_shapes_8_bit_products_need(name):
    task = build_task(load_recipe(name).recipe, device=torch.device("meta"))
    shapes = {m.weight.shape for m in task.model.modules() if isinstance(m, torch.nn.Linear)}
    assert all(size % 16 == 0 for shape in shapes for size in shape)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_recipe_has_data_for_its_evaluation(name):
    recipe = load_recipe(name).recipe
    small = ["model.layers=1", "model.width=16", "model.heads=1", "model.kv_heads=1"]
    small += ["model.mlp_width=16"]
    task = build_language_model(load_recipe(name, small).recipe, device=torch.device("cpu"))
    assert len(task.validation_data) >= recipe.data.eval_windows
    assert len(task.train_data) >= recipe.batch_size


@pytest.mark.parametrize("name", FIT)
def test_a_billion_parameters_fit_on_the_gpu_that_the_recipe_names(name):
    recipe, hardware = load_recipe(name).recipe, named_hardware(FIT[name])
    memory, limit = predict(recipe, hardware).memory, budget(recipe, hardware)
    assert memory.needed <= limit
    weights = sum(memory.roles[role] for role in ("params", "master", "moments"))
    count = sum(
        p.numel() for p in build_task(recipe, device=torch.device("meta")).model.parameters()
    )
    assert weights / count == pytest.approx(6, rel=0.05)
