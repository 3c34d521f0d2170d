import json

import pytest

from narrowcast.config import recipe_schema
from narrowcast.config.sections import CommonSettings


@pytest.fixture
def schema(sections):
    return recipe_schema({"toy": sections("toy")})


def resolve(schema, section):
    reference, empty = section["anyOf"]
    assert empty == {"type": "null"}
    return schema["$defs"][reference["$ref"].removeprefix("#/$defs/")]


def test_the_schema_is_json_and_has_every_common_setting(schema):
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == {*CommonSettings.model_fields, "data", "model"}
    assert set(schema["required"]) == {"workload", "batch_size"}
    assert schema["anyOf"] == [{"required": ["steps"]}, {"required": ["epochs"]}]
    assert schema["additionalProperties"] is False


def test_the_workload_decides_what_data_and_model_hold(schema):
    assert schema["properties"]["workload"]["enum"] == ["toy"]
    (branch,) = schema["allOf"]
    assert branch["if"]["properties"]["workload"] == {"const": "toy"}
    sections = branch["then"]["properties"]
    assert set(resolve(schema, sections["data"])["properties"]) == {
        "workers",
        "prefetch",
        "text",
        "files",
        "length",
        "held_out",
    }
    assert "width" in resolve(schema, sections["model"])["properties"]


def test_every_reference_in_the_schema_leads_somewhere(schema):
    text = json.dumps(schema)
    named = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert named == set(schema["$defs"])


def test_bounds_choices_and_descriptions_are_in_the_schema(schema):
    steps = schema["properties"]["steps"]
    assert (steps["type"], steps["minimum"]) == ("integer", 1)
    assert steps["description"] == "number of optimizer steps, unless epochs is set"
    optimizer = resolve(schema, schema["properties"]["optimizer"])
    assert "adamw" in optimizer["properties"]["name"]["enum"]
