"""The layer that swells changes nothing in fp32, and is found and widened in fp16."""

import pytest
import torch

from narrowcast.errors import ConfigError, DivergedError
from narrowcast.hardware import Hardware
from narrowcast.runs import FindingRecord, PrecisionRecord, StepRecord
from narrowcast.training.phase_plans import plan_phases
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads import build_task, load_recipe

SMALL = [
    "model.layers=3", "model.width=32", "model.heads=2", "batch_size=4", "data.length=32",
    "data.eval_windows=4", "steps=30", "eval.every=0", "health.every=1",
]  # fmt: skip


def run(*words):
    recipe = load_recipe("health/saturating", [*SMALL, *words]).recipe
    task = build_task(recipe, device=torch.device("cpu"))
    hardware = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
    planned = plan_phases(recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)[0]
    return list(train_loop(prepare_recipe(recipe, task, plan=planned), task, recipe))


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


def test_in_fp32_the_losses_are_those_of_the_plain_model():
    plain, swelling = (
        [r.loss for r in of(StepRecord, run(f"rehearse.swell={every}", "precision.policy=fp32"))]
        for every in (0, 1)
    )
    assert plain == swelling


def test_in_fp16_the_layer_is_named_and_widened_and_the_run_goes_on():
    records = run("rehearse.swell=1")
    (change,) = of(PrecisionRecord, records)
    assert (change.module, change.before, change.after) == ("blocks.1.mlp.down", "fp16", "bf16")
    named = {f.module for f in of(FindingRecord, records) if "overflow" in f.what}
    assert "blocks.1.mlp.down" in named
    steps = of(StepRecord, records)
    assert sum(not step.applied for step in steps) <= 4
    assert steps[-1].applied


def test_a_layer_does_not_fall_back_into_a_format_that_it_has_outgrown():
    words = ["precision.adapt.calm_steps=5", "precision.adapt.cooldown=2"]
    records = run("rehearse.swell=1", *words)
    changes = [(r.module, r.after) for r in of(PrecisionRecord, records)]
    assert changes == [("blocks.1.mlp.down", "bf16")]
    assert of(PrecisionRecord, records)[0].step < 20  # of 30, so there was time


def test_a_swelling_layer_stalls_the_run_without_adaptive_precision():
    with pytest.raises(DivergedError, match=r"the last \d\d of its 30 steps were skipped"):
        run("rehearse.swell=1", "precision.adapt.enabled=false")


def test_a_bias_would_not_be_doubled_with_the_rest_so_it_is_refused():
    recipe = load_recipe("health/saturating", ["model.bias=true"]).recipe
    with pytest.raises(ConfigError, match=r"rehearse\.swell=10 needs .*model\.bias=false"):
        build_task(recipe, device=torch.device("meta"))
