"""The JSON schema of recipes, so that editors complete and check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from narrowcast.config.overrides import BY_NAME, SWITCHES
from narrowcast.config.sections import CommonSettings, Sections
from narrowcast.config.tree import literal_values

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NONE = {"type": "string", "pattern": "^([nN][oO][nN][eE]|[nN][uU][lL][lL])$"}
"""How none is written besides YAML's null: `clip_norm: none`."""


def recipe_schema(sections: Mapping[str, Sections]) -> dict[str, Any]:
    """Return the schema of recipes; the workload decides which sections there are."""
    models: set[type[BaseModel]] = {CommonSettings}
    for added in sections.values():
        models |= set(added.by_name.values())
    ordered = sorted(models, key=lambda model: (model.__module__, model.__qualname__))
    references, schema = models_json_schema([(model, "validation") for model in ordered])
    definitions = schema["$defs"]
    for definition in definitions.values():
        definition["properties"] = {
            name: _as_written(node) for name, node in definition["properties"].items()
        }
    common = definitions.pop(references[CommonSettings, "validation"]["$ref"].rpartition("/")[2])
    own: dict[str, Any] = {name: {} for added in sections.values() for name in added.by_name}
    properties = {**common["properties"], **own}
    properties["workload"] = {**properties["workload"], "enum": sorted(sections)}
    for (name,) in BY_NAME:
        node, section = properties[name], CommonSettings.model_fields[name].annotation
        assert isinstance(section, type)
        names = literal_values(section.model_fields["name"].annotation)
        alone = {"type": "string", "enum": list(names)}
        properties[name] = {**node, "anyOf": [*node["anyOf"], alone]}
    for (name,) in SWITCHES:
        node = properties[name]
        properties[name] = {**node, "anyOf": [*node["anyOf"], {"type": "boolean"}]}
    # How long a run is must be said, in one way or the other.
    required = [name for name in common["required"] if name != "steps"]
    return {
        "$schema": DIALECT,
        **common,
        "required": required,
        "anyOf": [{"required": ["steps"]}, {"required": ["epochs"]}],
        "title": "narrowcast recipe",
        "properties": properties,
        "allOf": [
            {
                "if": {"properties": {"workload": {"const": name}}, "required": ["workload"]},
                "then": {
                    "properties": {
                        # This workload does not have the sections of other workloads.
                        section: _section(references, added.by_name[section])
                        if section in added.by_name
                        else False
                        for section in own
                    },
                    "required": [n for n, model in added.by_name.items() if _must_be_set(model)],
                },
            }
            for name, added in sorted(sections.items())
        ],
        "$defs": definitions,
    }


def _section(references: Mapping[Any, Any], model: type[BaseModel]) -> dict[str, Any]:
    node: dict[str, Any] = references[model, "validation"]
    return node if _must_be_set(model) else _or_empty(node)


def _must_be_set(model: type[BaseModel]) -> bool:
    """Return whether a section has a setting without a default."""
    return any(field.is_required() for field in model.model_fields.values())


def _as_written(node: dict[str, Any]) -> dict[str, Any]:
    """Allow what a file may hold too: an empty section, and none in any letters."""
    if "$ref" in node:
        return _or_empty(node)
    options = node.get("anyOf", [])
    return {**node, "anyOf": [*options, NONE]} if {"type": "null"} in options else node


def _or_empty(node: dict[str, Any]) -> dict[str, Any]:
    """Allow an empty section."""
    about = {name: part for name, part in node.items() if name != "$ref"}
    return {**about, "anyOf": [{"$ref": node["$ref"]}, {"type": "null"}]}
