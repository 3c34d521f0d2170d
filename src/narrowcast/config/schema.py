"""The JSON schema of recipes, so that editors complete and check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from narrowcast.config.sections import CommonSettings, Sections

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema(sections: Mapping[str, Sections]) -> dict[str, Any]:
    """Return the schema of recipes for the workloads in `sections`, by name.

    The workload that a recipe names decides what its `data` and `model` sections hold.
    """
    models: set[type[BaseModel]] = {CommonSettings}
    for added in sections.values():
        models |= {added.data, added.model}
    ordered = sorted(models, key=lambda model: (model.__module__, model.__qualname__))
    references, schema = models_json_schema([(model, "validation") for model in ordered])
    definitions = schema["$defs"]
    common = definitions.pop(references[CommonSettings, "validation"]["$ref"].rpartition("/")[2])
    properties = {**common["properties"], "data": {}, "model": {}}
    properties["workload"] = {**properties["workload"], "enum": sorted(sections)}
    return {
        "$schema": DIALECT,
        "title": "narrowcast recipe",
        **common,
        "properties": properties,
        "allOf": [
            {
                "if": {"properties": {"workload": {"const": name}}, "required": ["workload"]},
                "then": {
                    "properties": {
                        "data": references[added.data, "validation"],
                        "model": references[added.model, "validation"],
                    }
                },
            }
            for name, added in sorted(sections.items())
        ],
        "$defs": definitions,
    }
