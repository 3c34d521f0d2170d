"""Wrong entries of `faults`: each error names the entry, the field and what to write."""

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
        ({"role": "outputs"}, "entry 2: role needs one of input, weight, output, grad_output, "
         "grad_weight, got 'outputs'; did you mean output?"),
        ({"value": 3}, "entry 2: value needs one of inf, nan, large, bit-flip, got 3; "
         "write value: inf"),
        ({"step": 0}, "entry 2: step needs a whole number of at least 1, got 0; write step: 40"),
        ({"step": "four"}, "entry 2: step needs a whole number of at least 1, got 'four'"),
        ({"module": 7}, "entry 2: module needs text, got 7; write module: blocks.1.mlp.up"),
        ({"index": -1}, "entry 2: index needs a whole number of at least 0, or none, got -1"),
        ({"modul": "head"}, "entry 2: modul: no such setting; did you mean module?"),
        ({"xyz": 1}, "entry 2: xyz: no such setting; it has step, module, role, value, micro_"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_to_write(change, said):
    with pytest.raises(ConfigError) as refused:
        load(GOOD, {**GOOD, **change})
    text = str(refused.value)
    assert said in text
    assert "needs a list" not in text


def test_a_missing_field_is_named_and_all_that_is_wrong_is_said_at_once():
    without = {name: value for name, value in GOOD.items() if name != "step"}
    with pytest.raises(ConfigError) as refused:
        load({**without, "role": "x"}, 3)
    text = str(refused.value)
    assert "entry 1 has no step; write step: 40 (step at which the fault is injected)" in text
    assert "entry 1: role needs one of" in text
    assert (
        "entry 2 is 3; write {step: 40, module: blocks.1.mlp.up, role: input, value: inf}" in text
    )


def test_what_is_no_list_is_refused_as_that():
    with pytest.raises(ConfigError, match="needs a list: a mapping with step, module, role"):
        load_recipe("quickstart", ["fault_injection=3"])


def test_numbers_and_none_are_read_as_in_any_other_setting():
    (fault,) = load({**GOOD, "step": 1e1, "index": "none"})
    assert (fault.step, fault.index) == (10, None)


def test_what_is_advised_is_taken_as_it_is_written():
    with pytest.raises(ConfigError) as refused:
        load(3)
    advised = str(refused.value).partition("write ")[2]
    (fault,) = load_recipe("quickstart", [f"fault_injection=[{advised}]"]).recipe.fault_injection
    assert (fault.step, fault.module) == (40, "blocks.1.mlp.up")
