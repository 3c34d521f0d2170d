"""Hostile values of settings are answered quickly, with a message."""

import time

import pytest

from narrowcast.cli.entry import run_command
from narrowcast.config import recipe_schema
from narrowcast.config.tree import leaves, plain_types, recipe_tree
from narrowcast.workloads import REGISTRY, workload_sections

SECONDS = 10
"""Of CPU time, so that other processes do not count; most values take hundredths."""
WORKLOADS = {
    "tutorial": "tutorial",
    "lm": "quickstart",
    "sft": "sft/tiny",
    "genomics": "genomics/variant_effect",
    "decompose": "decompose/tms_5-2",
    "forecast": "forecast/nhits",
}
HOSTILE = (
    10**18, -(10**18), "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "0o" + "7" * 5000,
    "1" + "0" * 5000 + ".5", "1e308", "-1e308", "1e999", 0, -1, ".nan", ".inf", "-.inf", "text",
)  # fmt: skip
TEXTS = (
    "9" * 5000, "", "x" * 5000, "x" * 100_000, "é" * 150, "\0", "[" * 5000, "{a: 1}", "[1, 2]",
)  # fmt: skip


def settings(workload):
    """Return the dotted name and the field of every setting; the common ones are the tutorial's."""
    sections = workload_sections(workload)
    for path, field in leaves(recipe_tree(sections)):
        if workload == "tutorial" or path[0] in sections.by_name:
            yield ".".join(path), field


def numeric(field):
    return bool({int, float} & set(plain_types(field.annotation)))


def nodes(schema, path=""):
    """Return every part of a schema that says what a value is."""
    if isinstance(schema, dict):
        if "type" in schema:
            yield path, schema
        for name, part in schema.items():
            yield from nodes(part, f"{path}/{name}")
    elif isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from nodes(part, f"{path}/{number}")


BOUNDS = {
    "integer": {"maximum", "exclusiveMaximum"},
    "number": {"maximum", "exclusiveMaximum"},
    "string": {"maxLength", "enum", "const", "pattern"},
    "array": {"maxItems"},
    "object": {"maxProperties", "properties"},
}


def test_every_number_text_and_list_of_a_recipe_has_an_upper_bound():
    schema = recipe_schema({name: workload_sections(name) for name in WORKLOADS})
    found = [(path, node) for path, node in nodes(schema) if node["type"] in BOUNDS]
    assert len(found) > 100
    assert [path for path, node in found if not BOUNDS[node["type"]] & set(node)] == []


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_setting_answers_hostile_values_in_words_and_at_once(workload, capsys):
    assert set(WORKLOADS) == set(REGISTRY.names)
    slow, wrong = [], []
    for number, (key, field) in enumerate(settings(workload)):
        values = HOSTILE if numeric(field) else TEXTS
        for value in values[number % 3 :: 3]:  # each setting a third, each value a third of them
            began = time.process_time()
            code = run_command(["plan", WORKLOADS[workload], f"{key}={value}"])
            taken = time.process_time() - began
            said = capsys.readouterr()
            shown = f"{key}={str(value)[:40]}"
            if taken > SECONDS:
                slow.append((shown, taken))
            if code not in (0, 2, 3) or len(said.err) > 5000 or "Traceback" in said.err:
                wrong.append((shown, code, said.err[:200]))
    assert (slow, wrong) == ([], [])
