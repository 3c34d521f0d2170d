import json

import pytest
from pydantic import ValidationError

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware, Support
from narrowcast.runner.by_task import decided

CPU = ["device=cpu", "steps=4"]


@pytest.fixture
def h200():
    native = Support(how="native", reason="compute capability 9.0")
    return Hardware(
        device="cuda:0",
        name="H200",
        memory_bytes=139 * 2**30,
        capability=(9, 0),
        products=dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2"), native),
    )


@pytest.fixture
def bare(tmp_path):
    """A recipe that sets little."""
    path = tmp_path / "bare.yaml"
    path.write_text(
        "workload: lm\nsteps: 4\nbatch_size: 4\nmodel: {layers: 2, width: 32, heads: 2}\n"
        "data: {length: 16}\n"
    )
    return path


def test_a_task_sets_what_nobody_has_set_and_resolved_json_says_so(tmp_path, bare):
    words = [*CPU, "precision.task=variant_effect"]
    with nc.train(bare, words, out=tmp_path / "run") as run:
        assert run.recipe.clip_norm == 0.5
        list(run)
    resolved = json.loads((tmp_path / "run/resolved.json").read_text())
    assert resolved["clip_norm"] == {"value": 0.5, "origin": "task variant_effect"}
    growth = resolved["precision.loss_scale.growth_interval"]
    assert growth == {"value": 1000, "origin": "task variant_effect"}
    assert resolved["precision.task"] == {"value": "variant_effect", "origin": "command line"}
    assert resolved["precision.loss_scale.init_scale"]["origin"] == "default"


def test_the_file_and_the_command_line_win_over_a_task(bare, h200):
    bare.write_text(bare.read_text() + "clip_norm: 3.0\n")
    words = ["precision.task=generation", "precision.loss_scale.growth_interval=7"]
    loaded = decided(nc.load_recipe(bare, words), h200).loaded
    assert loaded.recipe.clip_norm == 3.0
    assert loaded.origins["clip_norm"] == "bare.yaml"
    assert loaded.recipe.precision.loss_scale.growth_interval == 7
    assert loaded.origins["precision.loss_scale.growth_interval"] == "command line"
    assert loaded.recipe.precision.policy == "fp16"
    assert loaded.origins["precision.policy"] == "task generation"


def test_what_is_said_wins_even_where_it_is_the_default(bare, h200):
    loaded = nc.load_recipe(bare, ["precision.task=generation", "clip_norm=1.0"])
    assert decided(loaded, h200).loaded.recipe.clip_norm == 1.0


def test_without_a_task_a_recipe_is_left_as_it_is(bare, h200):
    loaded = nc.load_recipe(bare)
    assert decided(loaded, h200).loaded is loaded


def test_a_row_tells_size_machine_and_who_has_set_what(bare, h200):
    loaded = nc.load_recipe(bare, ["precision.task=generation", "clip_norm=1.5"])
    row = decided(loaded, h200).row
    assert row["task"] == "generation"
    assert (row["size"], row["hardware"]) == ("small", "≥ 9.0")
    assert row["parameters"] == nc.plan_recipe(bare, CPU).to_json()["bytes"]["params"] / 4
    assert row["settings"]["clip_norm"] == {"value": 1.5, "origin": "command line"}
    assert row["settings"]["precision.policy"] == {"value": "fp16", "origin": "task generation"}
    assert row["left_out"] == ["offload of optimizer: the state of small models fits on the device"]


def test_a_policy_that_would_be_refused_is_left_out_and_told(bare, h200):
    # An exception without a scale is fine in bf16, and none for a policy in fp8.
    words = [f"model={MEDIUM}", "data.text=synthetic", "precision.task=pretrain"]
    loaded = nc.load_recipe(bare, [*words, "precision.overrides={head: scaling=none}"])
    found = decided(loaded, h200)
    assert (
        decided(nc.load_recipe(bare, words), h200).loaded.recipe.precision.policy == "fp8-delayed"
    )
    assert found.loaded.recipe.precision.policy == "default"
    (told,) = found.row["left_out"]
    assert told.startswith("precision.policy=fp8-delayed: ")
    assert "needs a scale" in told


MEDIUM = "{layers: 12, width: 1024, heads: 16, tied: false, vocab: 50304}"


def memory_of(bare, hardware, *words):
    loaded = nc.load_recipe(bare, [f"model={MEDIUM}", "data.text=synthetic", *words])
    found = decided(loaded, hardware)
    return found.loaded.recipe.memory, found.row["left_out"]


def test_a_task_saves_memory_where_that_can_be(bare, h200):
    memory, left_out = memory_of(bare, h200, "precision.task=generation")
    assert (memory.activation_checkpointing, memory.offload) == ("blocks", ("optimizer",))
    assert left_out == []


@pytest.mark.parametrize(
    ("words", "checkpoint", "told"),
    [
        (["cuda_graph=true"], "none", "memory.activation_checkpointing=blocks: cuda_graph=true"),
        (
            ["model.layers=1"],
            "none",
            "memory.activation_checkpointing=blocks: memory: no blocks were detected",
        ),
        (["optimizer.name=sgd"], "blocks", "memory.offload=[optimizer]: sgd cannot offload"),
    ],
)
def test_memory_that_cannot_be_saved_is_left_out_and_told(bare, h200, words, checkpoint, told):
    memory, left_out = memory_of(bare, h200, *words, "precision.task=generation")
    assert memory.activation_checkpointing == checkpoint
    assert any(text.startswith(told) for text in left_out)


def test_who_names_a_policy_gets_no_wider_ones_unasked(bare, h200):
    words = ["precision.task=generation", "precision.policy=fp16"]
    assert decided(nc.load_recipe(bare, words), h200).loaded.recipe.precision.adapt.overflows == 0
    loaded = decided(nc.load_recipe(bare, words[:1]), h200).loaded
    assert loaded.recipe.precision.adapt.overflows == 5
    asked = [*words, "precision.adapt.overflows=3"]
    assert decided(nc.load_recipe(bare, asked), h200).loaded.recipe.precision.adapt.overflows == 3


def test_a_run_goes_on_with_what_its_task_decided_when_it_began(tmp_path, bare):
    words = [*CPU, "precision.task=generation", "checkpoint.every=2"]
    with nc.train(bare, words, out=tmp_path / "run") as run:
        list(run)
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["task"]["task"] == "generation"
    with nc.resume(tmp_path / "run", ["steps=6"]) as again:
        assert again.notices == []
        assert again.recipe.clip_norm == 2.0
        assert again.loaded.origins["clip_norm"] == "task generation"
        list(again)
    assert json.loads((tmp_path / "run/plan.json").read_text())["task"] == plan["task"]


def test_a_task_that_there_is_not_is_refused_with_a_suggestion(bare):
    with pytest.raises(ConfigError, match="Did you mean generation"):
        nc.load_recipe(bare, ["precision.task=generatoin"])


def test_applying_a_row_changes_no_recipe_in_place(bare, h200):
    loaded = nc.load_recipe(bare)
    before = loaded.resolved()
    after = nc.apply_task(loaded, nc.optimal_precision("variant_effect", 10, h200))
    assert after.recipe.clip_norm == 0.5
    assert loaded.resolved() == before
    with pytest.raises(ValidationError, match="frozen"):
        after.recipe.clip_norm = 1.0
