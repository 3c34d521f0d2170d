import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowcast.config import from_resolved, load_recipe
from narrowcast.config.sections import CommonSettings
from narrowcast.errors import CheckpointError, ConfigError


def test_words_win_over_the_file_and_the_file_over_defaults(load):
    loaded = load("steps=7", more="seed: 5\n")
    recipe = loaded.recipe
    assert (recipe.steps, recipe.seed, recipe.gradient_accumulation_steps) == (7, 5, 1)
    assert {
        key: loaded.origins[key] for key in ("steps", "seed", "gradient_accumulation_steps")
    } == {
        "steps": "command line",
        "seed": "quick.yaml",
        "gradient_accumulation_steps": "default",
    }


def test_a_section_that_is_switched_on_has_its_usual_setting(load, refusal):
    assert load("profile=true").recipe.profile.steps == 5
    assert load(more="profile: true\n").recipe.profile.steps == 5
    assert load("profile=false").recipe.profile.steps == 0
    assert "Write profile.steps=maybe" in refusal("profile=maybe")


def test_defaults_of_somebody_else_are_below_the_file_and_the_command_line(load):
    loaded = load("clip_norm=1.0", more="seed: 5\n")
    given = {"clip_norm": 2.0, "seed": 6, "precision.loss_scale.growth_interval": 7, "no.such": 1}
    after = loaded.with_defaults(given, origin="a preset")
    assert (after.recipe.clip_norm, after.recipe.seed) == (1.0, 5)
    assert after.recipe.precision.loss_scale.growth_interval == 7
    assert after.resolved()["precision.loss_scale.growth_interval"]["origin"] == "a preset"
    assert loaded.recipe.precision.loss_scale.growth_interval == 2000
    assert "no.such" not in after.resolved()


def test_a_default_of_a_workloads_section_can_be_another(load):
    after = load().with_defaults({"model.head.tied": False, "model.width": 3}, origin="a preset")
    assert (after.recipe.model.head.tied, after.recipe.model.width) == (False, 3)
    assert after.recipe.model.sizes == [1, 2]


def test_defaults_that_cannot_be_are_refused(load):
    with pytest.raises(ConfigError, match="a preset: init_scale must be at most max_scale 2"):
        load().with_defaults({"precision.loss_scale.max_scale": 2.0}, origin="a preset")


def test_the_last_of_two_words_for_one_setting_wins(load):
    assert load("steps=7", "steps=8").recipe.steps == 8


def test_the_run_is_called_after_the_file_unless_it_says_otherwise(load):
    assert load().recipe.name == "quick"
    assert load(more="name: mine\n").recipe.name == "mine"


def test_the_text_is_kept_as_it_was_given(load):
    assert load(more="# why\n").text == "workload: toy\nsteps: 100\nbatch_size: 4\n# why\n"


@pytest.mark.parametrize("text", ["1e-4", "1.0E-4", ".1e-3", "1E-4", "+.1E-03"])
@pytest.mark.parametrize("place", ["file", "word"])
def test_a_learning_rate_is_a_number_however_it_is_written(load, text, place):
    in_file = f"optimizer: {{lr: {text}}}\n" if place == "file" else ""
    words = [f"optimizer.lr={text}"] if place == "word" else []
    assert load(*words, more=in_file).recipe.optimizer.lr == 1e-4


def test_a_float_setting_takes_a_whole_number_and_a_whole_setting_takes_1e3(load):
    recipe = load("clip_norm=2", "steps=1e3", "model.sizes=[1e1, 2.0]").recipe
    assert (recipe.clip_norm, recipe.steps) == (2.0, 1000)
    assert type(recipe.steps) is int
    assert recipe.model.sizes == [10, 2]


@pytest.mark.parametrize("word", ["none", "None", "null", "NULL", "~", ""])
def test_none_is_written_in_any_way_people_write_it(load, word):
    recipe = load(f"clip_norm={word}", f"data.text={word}").recipe
    assert recipe.clip_norm is None
    assert recipe.data.text is None


def test_huge_scales_are_accepted_as_asked(load):
    words = ["precision.loss_scale.init_scale=1e30", "precision.loss_scale.max_scale=1e30"]
    assert load(*words).recipe.precision.loss_scale.init_scale == 1e30


def test_text_is_taken_as_it_stands(load):
    policy = "compute=e4m3, params=bf16; *.norm: fp32 # kept"
    recipe = load(f"precision.policy={policy}", "description=8", "data.text=a #1.txt").recipe
    assert recipe.precision.policy == policy
    assert recipe.description == "8"
    assert recipe.data.text == Path("a #1.txt")


def test_a_setting_that_takes_text_or_a_list_takes_both(load):
    assert load("data.files=*.txt").recipe.data.files == "*.txt"
    assert load("data.files=[a.txt, b.txt]").recipe.data.files == ["a.txt", "b.txt"]


def test_quotes_still_quote_text(load):
    assert load("precision.policy='bf16'").recipe.precision.policy == "bf16"


def test_entries_of_a_mapping_are_set_one_by_one_though_their_names_have_dots(load):
    in_file = 'precision: {overrides: {"*.norm": fp32}}\n'
    loaded = load("precision.overrides.blocks.0.*=compute=e4m3; a: b", more=in_file)
    assert loaded.recipe.precision.overrides == {
        "*.norm": "fp32",
        "blocks.0.*": "compute=e4m3; a: b",
    }
    assert loaded.origins["precision.overrides"] == "quick.yaml, command line"


def test_a_word_may_set_several_settings_of_a_section(load):
    recipe = load("optimizer={name: sgd, momentum: .9}", more="optimizer: {lr: 3e-4}\n").recipe
    assert recipe.optimizer.model_dump(include={"name", "momentum", "lr"}) == {
        "name": "sgd",
        "momentum": 0.9,
        "lr": 3e-4,
    }


def test_a_section_left_empty_in_a_file_has_its_defaults(load):
    assert load(more="precision:\nmodel:\n").recipe == load().recipe


def test_a_byte_order_mark_and_windows_line_ends_are_read(load):
    text = b"\xef\xbb\xbfworkload: toy\r\nsteps: 100\r\nbatch_size: 4\r\n"
    assert load(text=text).recipe == load().recipe


def test_resolved_names_every_setting_and_who_set_it(load):
    resolved = load("seed=3").resolved()
    assert resolved["seed"] == {"value": 3, "origin": "command line"}
    assert resolved["steps"] == {"value": 100, "origin": "quick.yaml"}
    assert resolved["model.head.tied"] == {"value": True, "origin": "default"}
    assert "data" not in resolved
    json.dumps(resolved, allow_nan=False)


def test_a_run_is_loaded_again_from_what_it_was_resolved_to(load, sections):
    words = ["precision.overrides.*.norm=fp32", "optimizer.betas=[.9, .95]", "data.text=a/b.txt"]
    first = load(*words, "clip_norm=none")
    kept = json.loads(json.dumps(first.resolved()))
    again = from_resolved(kept, ["steps=200"], sections=sections, text=first.text)
    assert again.recipe == first.recipe.model_copy(update={"steps": 200})
    assert again.origins == {**first.origins, "steps": "command line"}
    assert again.text == first.text


def test_resolved_settings_of_another_version_are_refused_by_name(load, sections):
    resolved = {**load().resolved(), "precision.magic": {"value": 1, "origin": "default"}}
    with pytest.raises(ConfigError, match=r"resolved.json: precision.magic: no such setting"):
        from_resolved(resolved, sections=sections)


@pytest.mark.parametrize("entry", [3, None, {"value": 3}, {"value": 3, "origin": "x", "z": 1}])
def test_damaged_resolved_settings_are_refused(load, sections, entry):
    with pytest.raises(CheckpointError, match=r"resolved.json is damaged: seed has no value"):
        from_resolved({**load().resolved(), "seed": entry}, sections=sections)


def test_all_problems_are_said_at_once(refusal):
    message = refusal(
        "stesp=3",
        "seed=-1",
        "optimizer.lr=abc",
        "optimizer.momentum=.9",
        "precision.loss_scale.min_scale=9",
        "precision.loss_scale.max_scale=3",
        "data.workers=-1",
        "model=big",
        "steps",
        more="steps: 100\n",
    )
    head, *problems = message.splitlines()
    assert head == f"{len(problems)} problems in the recipe:"
    for start in [
        "quick.yaml:4: steps is set twice",
        "stesp=3: no such setting. Did you mean steps",
        "steps: must be KEY=VALUE",
        "model=big: model is a section",
        "seed=-1: must be",
        "optimizer.lr=abc: must be a number",
        "data.workers=-1: must be",
        "precision.loss_scale.min_scale=9: min_scale must be at most max_scale, got 9 and 3",
        "optimizer.momentum=.9: adamw has no momentum",
    ]:
        assert sum(start in problem for problem in problems) == 1, (start, message)
    assert len(problems) == 9


def test_a_setting_found_wrong_is_not_complained_about_twice(refusal):
    # Without its bad ceiling, the scale's default ceiling would lie below the first scale.
    message = refusal("precision.loss_scale.init_scale=1e30", "precision.loss_scale.max_scale=-1")
    assert "\n" not in message
    assert message.startswith("precision.loss_scale.max_scale=-1: must be at least")


def test_an_unknown_workload_is_reported_before_the_settings_it_decides_on(refusal):
    message = refusal("workload=tyo", "stesp=3", "model.widht=3")
    assert message.startswith("workload=tyo: no such workload; did you mean toy?")
    assert "workload: must name a workload, got none. Write e.g. workload=lm" in refusal(
        text="seed: 1"
    )


def test_what_must_be_set_is_requested(refusal):
    message = refusal(text="workload: toy\n")
    assert message.startswith("2 problems")
    for key in ("steps", "batch_size"):
        assert f"quick.yaml: {key}: not set. Write {key}=VALUE" in message


SETTINGS = [*CommonSettings.model_fields, "data", "model"]


@given(
    words=st.lists(
        st.text(max_size=30)
        | st.builds("{}={}".format, st.sampled_from(SETTINGS), st.text(max_size=20))
        | st.builds("{}.{}={}".format, st.sampled_from(SETTINGS), st.text(max_size=5), st.text()),
        max_size=4,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_word_whatsoever_ends_in_anything_but_a_recipe_or_a_refusal(tmp_path, sections, words):
    path = tmp_path / "quick.yaml"
    path.write_text("workload: toy\nsteps: 100\nbatch_size: 4\n")
    try:
        loaded = load_recipe(path, words, sections=sections)
    except ConfigError:
        return
    assert from_resolved(loaded.resolved(), sections=sections).recipe == loaded.recipe


@given(content=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_whatsoever_ends_in_anything_but_a_recipe_or_a_refusal(tmp_path, sections, content):
    path = tmp_path / "quick.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"."):
        load_recipe(path, sections=sections)
