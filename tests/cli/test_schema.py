import json


def test_the_schema_is_json_that_knows_settings_of_the_engine_and_of_workloads(narrowcast):
    ended = narrowcast("schema")
    assert ended.code == 0
    schema = json.loads(ended.out)
    assert schema["properties"]["steps"]["type"] == "integer"
    assert "heads" in json.dumps(schema["$defs"])
