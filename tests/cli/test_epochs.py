"""`epochs` from the plan to the resume."""

import json
import math

import pytest

from narrowcast.runs import RunFolder, StepRecord
from narrowcast.workloads import build_task, load_recipe


@pytest.fixture
def text(tmp_path):
    """Return the words for a text of which an epoch takes a few steps."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a short text\n" for number in range(2000)))
    return f"data.text={path}"


@pytest.fixture
def steps_in(tiny, text):
    """Return how many steps some epochs have."""
    import torch

    recipe = load_recipe(tiny, ["batch_size=64", text]).recipe
    samples = len(build_task(recipe, device=torch.device("cpu")).train_data)
    return lambda epochs: math.ceil(samples * epochs / (64 * 16))


WORDS = ("batch_size=64", "gradient_accumulation_steps=16")


def resolved(out):
    return json.loads((out / "resolved.json").read_text())


def steps_of(out):
    with RunFolder.open(out) as run:
        return [r.step for r in run.records() if isinstance(r, StepRecord)]


def test_a_run_is_as_long_as_its_epochs(narrowcast, tiny, text, tmp_path, steps_in):
    out = tmp_path / "run"
    words = (*WORDS, text, "epochs=2", "lr_schedule.warmup_ratio=1", "lr_schedule.name=linear")
    said = narrowcast("train", tiny, *words, "--out", out)
    assert (said.code, said.err) == (0, "")
    steps = steps_in(2)
    assert f"{steps} steps (2 epochs) of" in said.out
    assert steps_of(out)[-1] == steps
    assert resolved(out)["steps"] == {"value": steps, "origin": "epochs"}
    assert f"has finished its {steps} steps" in narrowcast("resume", out).out
    # A third one: as many more steps, of which the warm-up is a share again.
    more = narrowcast("resume", out, "epochs=3")
    assert (more.code, more.err) == (0, "")
    assert "the warm-up is now a share of" in more.out
    assert steps_of(out) == list(range(1, steps_in(3) + 1))
    assert resolved(out)["steps"] == {"value": steps_in(3), "origin": "epochs"}
    # And steps in place of them.
    assert narrowcast("resume", out, f"steps={steps_in(3) + 1}").code == 0
    assert resolved(out)["epochs"]["value"] is None
    assert steps_of(out)[-1] == steps_in(3) + 1


def test_a_resumed_run_of_epochs_is_the_same_run(resumed_halfway, tiny, text):
    resumed = resumed_halfway(
        tiny, text, "epochs=1", "batch_size=64", "gradient_accumulation_steps=16", every=5
    )
    assert resolved(resumed)["steps"]["origin"] == "epochs"


def test_a_plan_says_that_it_does_not_know_the_steps(narrowcast, tiny):
    schedule = "precision.schedule=[{policy: bf16, until: 30%}, {policy: fp32}]"
    said = narrowcast("plan", tiny, "epochs=2", schedule)
    assert said.code == 0
    assert "as many as 2 epochs have; no data is read for a plan" in said.out
    assert "until 30% of the run" in said.out
