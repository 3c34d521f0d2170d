import pytest
import torch

from narrowcast.bench.measure.memory import training_bytes, usable_bytes
from narrowcast.workloads import load_recipe


def test_the_estimate_of_gpt_350m_is_near_what_eager_autocast_took_on_a_gpu():
    found = training_bytes(load_recipe("lm/gpt-350m").recipe) / 2**30
    assert found == pytest.approx(28.1, rel=0.1)


def test_a_part_of_the_memory_is_left_alone():
    assert usable_bytes(torch.device("cpu"), total_bytes=1000) == 850
