"""Wrong entries of `fault_injection`: each error names the entry, the field and what to write."""

import json

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe

GOOD = {"step": 4, "module": "head", "role": "output", "value": "inf"}


def load(*faults):
    return load_recipe(
        "quickstart", [f"fault_injection={json.dumps(faults)}"]
    ).recipe.fault_injection


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"role": "outputs"}, "item 2: role must be 'input', 'weight', 'output', 'grad_output' or "
         "'grad_weight', got 'outputs'. Did you mean output?"),
        ({"step": 0}, "item 2: step must be at least 1, got 0. Write e.g. 40"),
        ({"step": "four"}, "item 2: step must be a whole number, got 'four'"),
        ({"module": 7}, 'item 2: module must be text, got 7. Put it in quotes: "7"'),
        ({"index": -1}, "item 2: index must be at least 0, or none, got -1"),
        ({"modul": "head"}, "item 2: modul is not a setting. Did you mean module?"),
        ({"xyz": 1}, "item 2: xyz is not a setting. The settings are step, module, role, value"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_to_write(change, said):
    with pytest.raises(ConfigError) as refused:
        load(GOOD, {**GOOD, **change})
    text = str(refused.value)
    assert said in text
    assert "must be a list" not in text


def test_a_missing_field_is_named_and_all_that_is_wrong_is_said_at_once():
    without = {name: value for name, value in GOOD.items() if name != "step"}
    with pytest.raises(ConfigError) as refused:
        load({**without, "role": "x"}, 3)
    text = str(refused.value)
    assert "item 1: step is not set. Write step: 40 (step at which the fault is injected)" in text
    assert "item 1: role must be 'input'" in text
    assert "item 2 must be a mapping, got 3. Write {step: 40, module: blocks.1.mlp.up," in text


def test_what_is_no_list_is_refused_as_that():
    with pytest.raises(ConfigError, match="fault_injection=3: must be a list, got 3"):
        load_recipe("quickstart", ["fault_injection=3"])


def test_numbers_and_none_are_read_as_in_any_other_setting():
    (fault,) = load({**GOOD, "step": 1e1, "index": "none"})
    assert (fault.step, fault.index) == (10, None)


def test_what_is_advised_is_taken_as_it_is_written():
    with pytest.raises(ConfigError) as refused:
        load(3)
    advised = str(refused.value).partition("Write ")[2]
    (fault,) = load_recipe("quickstart", [f"fault_injection=[{advised}]"]).recipe.fault_injection
    assert (fault.step, fault.module) == (40, "blocks.1.mlp.up")
