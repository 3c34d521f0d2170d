"""What a recipe's plan is told of the run."""

import pytest
from torch import nn

from narrowcast.hardware import detect_hardware
from narrowcast.training.phase_plans import plan_phases
from narrowcast.workloads import load_recipe

FAULT = "fault_injection=[{step: 1, module: head, role: output, value: nan}]"


@pytest.mark.parametrize(
    ("words", "running"),
    [
        ([], "graphed"),
        (["cuda_graph=true", "compile=true"], "graphed"),
        (["cuda_graph=false"], "eager"),
        (["cuda_graph=false", "compile=true"], "compiled"),
        (["memory.activation_checkpointing=blocks"], "eager"),
        (["cuda_graph=true", "memory.activation_checkpointing=blocks"], "graphed"),
        (["deterministic=true", "compile=true"], "compiled"),
        ([FAULT], "eager"),
    ],
)
def test_a_plan_takes_the_model_to_run_as_its_steps_will(words, running):
    recipe = load_recipe("quickstart", words).recipe
    model = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
    plan = plan_phases(recipe, model, hardware=detect_hardware("cpu"), gemm_rows=16)[0]
    assert plan.execution == running
