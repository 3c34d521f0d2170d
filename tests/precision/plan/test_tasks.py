"""The whole table of tasks, hardware and sizes, written out beside the code and not by it."""

import math
from typing import get_args

import pytest

import narrowcast as nc
from narrowcast.config.common_sections import TaskName
from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware, Support
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.tasks import TASKS, model_size_class, optimal_precision

NATIVE = Support(how="native", reason="it does")
GIB = 2**30


def machine(device, capability, *formats, memory=80):
    """A machine that multiplies these formats beside fp32."""
    return Hardware(
        device=device,
        name="a machine",
        memory_bytes=memory * GIB,
        capability=capability,
        products=dict.fromkeys(("fp32", *formats), NATIVE),
    )


MACHINES = {
    # torch and NVIDIA's tables: fp16 from 7.0, bf16 from 8.0, fp8 from 8.9.
    "cpu": machine("cpu", None),
    "cpu with bf16": machine("cpu", None, "bf16"),
    "cpu with fp16": machine("cpu", None, "fp16"),
    "cpu with both": machine("cpu", None, "bf16", "fp16"),
    "6.1": machine("cuda:0", (6, 1)),
    "7.5": machine("cuda:0", (7, 5), "fp16"),
    "8.0": machine("cuda:0", (8, 0), "fp16", "bf16"),
    "8.6": machine("cuda:0", (8, 6), "fp16", "bf16"),
    "8.9": machine("cuda:0", (8, 9), "fp16", "bf16", "e4m3", "e5m2"),
    "8.9 of 24 GiB": machine("cuda:0", (8, 9), "fp16", "bf16", "e4m3", "e5m2", memory=24),
    "9.0": machine("cuda:0", (9, 0), "fp16", "bf16", "e4m3", "e5m2"),
    "10.0": machine("cuda:0", (10, 0), "fp16", "bf16", "e4m3", "e5m2"),
    "mps": machine("mps", None, "fp16", "bf16"),
}

# The policy by what the task wants: of small models, then of medium and large ones.
FP8 = {
    "cpu": ("fp32", "fp32"),
    "cpu with bf16": ("bf16", "bf16"),
    "cpu with fp16": ("fp32", "fp32"),
    "cpu with both": ("bf16", "bf16"),
    "6.1": ("fp32", "fp32"),
    "7.5": ("fp16", "fp16"),
    "8.0": ("bf16", "bf16"),
    "8.6": ("bf16", "bf16"),
    "8.9": ("bf16", "fp8-delayed"),
    "8.9 of 24 GiB": ("bf16", "fp8-delayed"),
    "9.0": ("bf16", "fp8-delayed"),
    "10.0": ("bf16", "fp8-delayed"),
    "mps": ("bf16", "bf16"),
}
FP8_OF_LARGE_GPUS = {**FP8, "8.9 of 24 GiB": ("bf16", "bf16")}
BF16 = {on: (small, small) for on, (small, _) in FP8.items()}
FP16_CAPABLE = ("8.0", "8.6", "8.9", "8.9 of 24 GiB", "9.0", "10.0", "mps")
FP16 = {**BF16, **dict.fromkeys(FP16_CAPABLE, ("fp16", "fp16"))}
POLICIES = {
    "genome_annotation": FP8,
    "variant_effect": BF16,
    "protein_function": FP8_OF_LARGE_GPUS,
    "generation": FP16,
    "domain_adaptation": FP16,
    "classify": BF16,
    "pretrain": FP8,
    "sft": BF16,
    "lora": BF16,
    "rl_fp16": FP16,
    "forecast": BF16,
    "decompose": BF16,
}

# Clip norm, growth interval, checkpointing, sizes for which a GPU offloads its optimizer state.
REST = {
    "genome_annotation": (1.0, 2000, "blocks", ()),
    "variant_effect": (0.5, 1000, "none", ()),
    "protein_function": (1.0, 2000, "blocks", ("large",)),
    "generation": (2.0, 500, "blocks", ("medium", "large")),
    "domain_adaptation": (0.8, 1500, "none", ()),
    "classify": (1.0, 2000, "none", ()),
    "pretrain": (1.0, 2000, "none", ()),
    "sft": (1.0, 2000, "none", ()),
    "lora": (1.0, 2000, "none", ()),
    "rl_fp16": (1.0, 2000, "none", ()),
    "forecast": (1.0, 2000, "none", ()),
    "decompose": (None, 2000, "none", ()),
}


@pytest.mark.parametrize("task", POLICIES)
def test_a_task_gets_its_row(task):
    clip_norm, growth_interval, checkpoint, offloading = REST[task]
    for on, (small, larger) in POLICIES[task].items():
        for size in ("small", "medium", "large"):
            policy = small if size == "small" else larger
            has_host_memory = MACHINES[on].device == "cuda:0" and size in offloading
            assert optimal_precision(task, size, MACHINES[on]).settings() == {
                "precision.policy": policy,
                "precision.loss_scale.growth_interval": growth_interval,
                "precision.adapt.overflows": 5 if policy == "fp16" else 0,
                "clip_norm": clip_norm,
                "memory.activation_checkpointing": checkpoint,
                "memory.offload": ("optimizer",) if has_host_memory else (),
            }, (on, size)


def test_the_table_has_every_task_that_a_recipe_may_name():
    assert tuple(TASKS) == get_args(TaskName) == tuple(POLICIES) == tuple(REST)


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ("cpu", "cpu"),
        ("mps", "mps"),
        ("6.1", "< 8.0"),
        ("7.5", "< 8.0"),
        ("8.0", "8.0"),
        ("8.6", "8.0"),
        ("8.9", "8.9"),
        ("9.0", "≥ 9.0"),
        ("10.0", "≥ 9.0"),
    ],
)
def test_a_machine_has_the_class_of_its_compute_capability(on, expected):
    assert optimal_precision("sft", "small", MACHINES[on]).hardware == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (0, "small"),
        (99_999_999, "small"),
        (100_000_000, "medium"),
        (999_999_999, "medium"),
        (1_000_000_000, "large"),
        (70_000_000_000, "large"),
    ],
)
def test_the_size_of_a_model_is_by_its_parameters(parameters, expected):
    assert model_size_class(parameters) == expected
    assert optimal_precision("sft", parameters, MACHINES["9.0"]).size == expected


@pytest.mark.parametrize("size", [None, -1, True, math.nan, math.inf, [1], "7B"])
def test_a_size_that_is_none_raises(size):
    with pytest.raises(ConfigError, match="model_size"):
        optimal_precision("sft", size, MACHINES["9.0"])


@pytest.mark.parametrize("on", MACHINES)
def test_nothing_that_a_task_gets_has_to_be_emulated(on):
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 64))
    for task in TASKS:
        chosen = optimal_precision(task, "large", MACHINES[on])
        plan = make_plan(model, chosen.policy, hardware=MACHINES[on], emulate=False)
        assert not plan.emulated, task


def test_fp8_before_its_tensor_cores_is_said_to_be_missing():
    a100 = machine("cuda:0", (8, 0), "fp16", "bf16")
    needs = Support(how="emulated", reason="fp8 products need compute capability 8.9")
    a100 = Hardware(
        device="cuda:0",
        name="A100",
        memory_bytes=80 * GIB,
        capability=(8, 0),
        products={**a100.products, "e4m3": needs},
    )
    chosen = optimal_precision("genome_annotation", "large", a100)
    assert chosen.policy == "bf16"
    assert chosen.reason.startswith("no fp8: fp8 products need compute capability 8.9; A100")


def test_memory_that_nobody_tells_of_is_not_counted_on():
    untold = machine("cuda:0", (9, 0), "fp16", "bf16", "e4m3", "e5m2", memory=0)
    assert optimal_precision("protein_function", "large", untold).policy == "bf16"


def test_what_cannot_be_offloaded_is_told():
    chosen = optimal_precision("generation", "large", MACHINES["cpu"])
    assert chosen.left_out == ("offload of optimizer: cpu has no separate memory",)


def test_a_misspelt_task_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean generation"):
        nc.optimal_precision("genration", "small", MACHINES["cpu"])


def test_a_size_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="must be small, medium, large"):
        nc.optimal_precision("sft", "huge", MACHINES["cpu"])
