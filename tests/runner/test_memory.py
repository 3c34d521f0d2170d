"""A run that saves memory tells what one that does not would tell."""

import dataclasses

import pytest

import narrowcast as nc
from narrowcast.runs import EvalRecord, FindingRecord, HealthRecord, StepRecord

FAULT = "fault_injection=[{step: 5, module: blocks.0.mlp.up, role: output, value: nan}]"
WORDS = (
    "steps=8",
    "eval.every=4",
    "health.every=2",
    "model.layers=2",
    "gradient_accumulation_steps=2",
    FAULT,
)


def told(tiny, folder, *words):
    """Return the records of a run without times and bytes."""
    kinds = (StepRecord, EvalRecord, FindingRecord, HealthRecord)
    records = [r for r in nc.train(tiny, [*WORDS, *words], out=folder) if isinstance(r, kinds)]
    unlike = {"seconds": 0.0, "peak_bytes": None}
    return [dataclasses.replace(r, **unlike) if isinstance(r, StepRecord) else r for r in records]


@pytest.mark.parametrize("policy", ["bf16", "fp8-delayed"])
def test_records_readings_and_verdicts_are_those_of_a_run_that_keeps_its_blocks(
    tiny, tmp_path, policy
):
    ways = ("none", "blocks", "selective")
    runs = [
        told(
            tiny,
            tmp_path / way,
            f"precision.policy={policy}",
            f"memory.activation_checkpointing={way}",
        )
        for way in ways
    ]
    assert any(isinstance(r, FindingRecord) and "blocks.0.mlp.up" in r.module for r in runs[0])
    assert any(isinstance(r, HealthRecord) for r in runs[0])
    # As text: a loss that is not a number is no other's equal.
    assert list(map(repr, runs[1])) == list(map(repr, runs[0]))
    assert list(map(repr, runs[2])) == list(map(repr, runs[0]))
