import pytest
import torch
from torch import nn

from narrowcast.bench.measure.memory import (
    CONTEXT_BYTES,
    activation_bytes,
    training_bytes,
    usable_bytes,
)
from narrowcast.bench.model import shapes_of
from narrowcast.workloads import load_recipe


def test_the_estimate_of_gpt_350m_is_near_what_eager_autocast_took_on_a_gpu():
    found = training_bytes(load_recipe("lm/gpt-350m").recipe) / 2**30
    assert found == pytest.approx(28.1, rel=0.1)


def test_a_part_of_the_memory_is_left_alone():
    assert usable_bytes(torch.device("cpu"), total_bytes=1000) == 850


def test_of_a_model_that_is_no_gpt_what_comes_out_of_its_weights_is_counted(waves):
    parameters = 16 * 32 + 32 + 32 * 32 + 32 + 32 * 2 + 2
    outputs = 32 + 32 + 2
    assert training_bytes(waves()) == 16 * parameters + 4 * 4 * outputs + CONTEXT_BYTES


def test_the_estimate_for_any_model_is_near_that_of_a_gpt_in_its_blocks():
    recipe = load_recipe("lm/gpt-350m").recipe
    task = shapes_of(recipe)
    blocks = nn.Sequential(*task.model.blocks)
    rough = activation_bytes(blocks, rows=task.gemm_rows)
    known = 34 * task.gemm_rows * 1024 * 24
    assert rough == pytest.approx(known, rel=0.1)
