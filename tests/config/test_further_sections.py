"""A workload's own sections are as strict as the others, from the file to the resumed run."""

import json

import pytest
from pydantic import Field, model_validator

from narrowcast.config import (
    DataSection,
    Section,
    Sections,
    from_resolved,
    load_recipe,
    recipe_schema,
)
from narrowcast.config.section import check_conflicts
from narrowcast.errors import ConfigError

ENOUGH = "workload: toy\nsteps: 100\nbatch_size: 4\n"


class Solver(Section):
    tolerance: float = Field(default=1e-4, gt=0, description="where it stops")


class Ica(Section):
    components: int = Field(default=20, ge=1, description="how many")
    kept: int = Field(default=2, ge=1, description="how many are kept")
    solver: Solver = Field(default_factory=Solver, description="how they are found")

    @model_validator(mode="after")
    def _fits(self):
        if self.kept > self.components:
            check_conflicts([(("kept", "components"), f"write kept={self.components}")])
        return self


def sections(workload):
    if workload != "toy":
        raise ConfigError("did you mean toy?")
    return Sections(data=DataSection, model=Section, ica=Ica)


@pytest.fixture
def load(tmp_path):
    def load(*words, more=""):
        (tmp_path / "a.yaml").write_text(ENOUGH + more)
        return load_recipe(tmp_path / "a.yaml", words, sections=sections)

    return load


def test_a_file_and_words_set_it_and_origins_say_who(load):
    loaded = load("ica.solver.tolerance=0.5", more="ica:\n  components: 7\n")
    assert loaded.recipe.section(Ica) == Ica(components=7, solver=Solver(tolerance=0.5))
    assert loaded.origins["ica.components"] == "a.yaml"
    assert loaded.origins["ica.solver.tolerance"] == "command line"
    assert loaded.origins["ica.kept"] == "default"


def test_what_resolved_json_keeps_gives_the_same_recipe_again(load):
    loaded = load("ica.components=9", "ica.kept=3")
    resolved = json.loads(json.dumps(loaded.resolved()))
    assert resolved["ica.components"] == {"value": 9, "origin": "command line"}
    again = from_resolved(resolved, sections=sections)
    assert again.recipe == loaded.recipe
    assert again.resolved() == loaded.resolved()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("ica.componets=3", r"no such setting. Did you mean components\?"),
        ("ica.components=0", "must be at least 1"),
        ("ica.kept=30", "write kept=20"),
        ("ica=3", r"ica is a section. Write ica\.components=3"),
        ("icb.components=3", r"Did you mean ica\? Write ica\.components=3"),
    ],
)
def test_what_is_wrong_in_it_is_said(load, word, said):
    with pytest.raises(ConfigError, match=said):
        load(word)


def test_of_an_unknown_workload_nothing_but_its_name_is_wrong(load):
    with pytest.raises(ConfigError) as caught:
        load("workload=tox", more="ica:\n  components: 7\n")
    assert str(caught.value) == "workload=tox: did you mean toy?"


def test_the_schema_has_it_for_its_workload_and_for_no_other():
    other = Sections(data=DataSection, model=Section)
    schema = recipe_schema({"toy": sections("toy"), "other": other})
    assert "ica" in schema["properties"]
    branches = {
        branch["if"]["properties"]["workload"]["const"]: branch["then"]["properties"]
        for branch in schema["allOf"]
    }
    assert branches["other"]["ica"] is False
    reference = branches["toy"]["ica"]["anyOf"][0]["$ref"].removeprefix("#/$defs/")
    assert set(schema["$defs"][reference]["properties"]) == {"components", "kept", "solver"}
