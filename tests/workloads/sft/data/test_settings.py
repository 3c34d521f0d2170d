import re

import pytest
from pydantic import ValidationError

from narrowcast.config import load_recipe, recipe_schema
from narrowcast.config.sections import Section, Sections
from narrowcast.config.tree import build_tree, leaves
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.settings import SftData


class Nothing(Section):
    pass


def test_the_defaults_are_those_people_know():
    data = SftData(path="x.jsonl")
    assert data.model_dump(exclude={"workers", "prefetch", "columns"}) == {
        "path": "x.jsonl",
        "validation_path": None,
        "dataset_config_name": None,
        "use_existing_splits": True,
        "validation_split": 0.1,
        "format": "auto",
        "empty_response": "refuse",
        "response_max_length": None,
        "instruction_max_length": None,
        "template_format": "auto",
        "instruction_template": "### Instruction:\n{instruction}\n\n### Response:\n{response}",
        "loss_on": "response",
        "max_seq_length": 2048,
        "too_long": "drop",
        "packing": False,
        "pretokenize": False,
        "pretokenize_cache_dir": None,
    }


BAD = [
    ({"path": ""}, "at least 1 character"),
    ({"path": ()}, "at least 1 item"),
    ({"path": "x" * 5000}, "at most 4096 characters"),
    ({"max_seq_length": 1}, "greater than or equal to 2"),
    ({"max_seq_length": 10**18}, "less than or equal to"),
    ({"validation_split": 1.0}, "less than 1"),
    ({"validation_split": "0.1"}, "valid number"),
    ({"template_format": "vicuna"}, "'auto', 'chat', 'alpaca', 'chatml' or 'basic'"),
    ({"instruction_template": "{instruction}"}, "must contain {instruction} once and, after"),
    ({"instruction_template": "{response}{instruction}"}, "must contain {instruction} once and"),
    ({"instruction_template": "{instruction} {response}"}, "write template_format=basic"),
    ({"columns": {"instruction": "q"}}, "name both columns"),
    ({"columns": {"context": "q"}}, "name both columns"),
    (
        {"columns": {"instruction": "q", "response": "a"}, "format": "infer"},
        "columns and format=infer both set the columns; leave one of them out",
    ),
    ({"pretokenize_cache_dir": "x"}, "needs pretokenize=true"),
    ({"max_len": 3}, "Extra inputs"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_what_cannot_be_obeyed_is_refused(given, said):
    with pytest.raises(ValidationError, match=re.escape(said)):
        SftData(**{"path": "x", **given})


def test_a_recipe_and_words_of_the_command_line_set_them(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("workload: sft\nsteps: 1\nbatch_size: 1\ndata:\n  path: [a.jsonl, b.csv]\n")
    words = ["data.columns.instruction=q", "data.columns.response=a", "data.validation_split=0"]
    sections = Sections(data=SftData, model=Nothing)
    loaded = load_recipe(recipe, words, sections=lambda name: sections)
    data = loaded.recipe.section(SftData)
    assert data.sources == ("a.jsonl", "b.csv")
    assert (data.columns.instruction, data.columns.response) == ("q", "a")
    assert data.validation_split == 0
    with pytest.raises(ConfigError, match=r"data.columns.*name both columns"):
        load_recipe(recipe, words[:1], sections=lambda name: sections)
    with pytest.raises(ConfigError, match=r"data.pretokenize.*needs pretokenize=true"):
        load_recipe(recipe, ["data.pretokenize_cache_dir=x"], sections=lambda name: sections)


def test_every_setting_says_what_it_is_and_every_value_has_a_bound():
    fields = dict(leaves(build_tree(SftData)))
    assert all(field.description for field in fields.values())
    schema = recipe_schema({"sft": Sections(data=SftData, model=Nothing)})
    bounds = {
        "integer": {"maximum", "exclusiveMaximum"},
        "number": {"maximum", "exclusiveMaximum"},
        "string": {"maxLength", "enum", "const", "pattern"},
        "array": {"maxItems"},
    }

    def unbounded(node):
        if isinstance(node, dict):
            if "type" in node and not bounds.get(node["type"], {"type"}) & set(node):
                yield node
            for part in node.values():
                yield from unbounded(part)
        elif isinstance(node, list):
            for part in node:
                yield from unbounded(part)

    assert list(unbounded(schema)) == []
