"""The schema takes what the loader takes: an editor marks no recipe that would run."""

import copy
import json
import math
import re

import pytest

from narrowcast.config import load_recipe, recipe_schema
from narrowcast.config.tree import leaves, recipe_tree
from narrowcast.errors import ConfigError
from narrowcast.workloads import workload_sections

WORKLOADS = ("lm", "sft", "tutorial")
SFT = {
    "data": {"path": "sums"}, "model": {"path": "tiny"}, "ica": {"mask_mode": "lesion"},
    "dpo": {"loss_type": "sigmoid"},
    "eval_tasks": {"perplexity": "text.txt", "exact_match": "rows.csv"},
}  # fmt: skip
NEEDED = {"lm": {}, "sft": SFT, "tutorial": {}}
"""What must be there, or else other settings would be refused as having nothing to do."""
SCHEMA = recipe_schema({name: workload_sections(name) for name in WORKLOADS})
VALUES = (
    None, "none", "NULL", "", "x", "30%", "cuda:1", True, 0, 1, 2, -1, 0.5, 1.5, 3.0, 128, 10**12,
    math.inf, "x" * 5000, [], [0.5, 0.5], ["x"], [None], {}, {"x": "fp32"}, {"x": 1},
    [{"policy": "bf16"}], [{"step": 1, "module": "a", "role": "input", "value": "inf"}],
    [{"step": 1, "module": "a", "role": "input", "value": "inf", "index": "none"}], [{"step": 0}],
)  # fmt: skip
TOGETHER = {
    "fault_injection", "model.heads", "model.kv_heads", "model.width", "lr_schedule.min_lr_ratio",
    "data.text", "parallel.restarts", "parallel.shard",
    "optimizer.fused", "optimizer.momentum", "precision.loss_scale.growth_factor",
    "precision.schedule",
    "precision.loss_scale.backoff_factor", "precision.loss_scale.init_scale",
    "precision.loss_scale.max_scale",
    "precision.loss_scale.min_scale", "precision.adapt.enabled", "data.tokenizer",
    "data.columns.instruction", "data.columns.response", "data.columns.context",
    "data.columns.system", "data.instruction_template", "data.pretokenize_cache_dir",
    "eval.patience", "eval.min_delta", "model.base_dtype", "epochs", "lr_schedule.warmup_ratio",
    "ica.scale", "ica.ica_two_sided", "memory.blocks", "strategy.name",
    "strategy.phases.warmup_steps", "strategy.preset", "strategy.policies",
    "strategy.readout.every", "strategy.lr_horizon", "precision.adapt.max_fraction",
    "precision.adapt.calm_steps",
    "precision.adapt.cooldown", "profile.first", "profile.steps", "dpo.loss_type",
}  # fmt: skip
"""Settings that may be fine alone and not with the others, or must be powers of two."""


def takes(node, value):
    """Say whether a value fits a schema, as far as ours go."""
    if isinstance(node, bool):
        return node
    kinds = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "string": isinstance(value, str),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    kinds["integer"] = kinds["number"] and float(value).is_integer()
    checks = {
        "$ref": lambda to: takes(SCHEMA["$defs"][to.rpartition("/")[2]], value),
        "anyOf": lambda parts: any(takes(part, value) for part in parts),
        "allOf": lambda parts: all(takes(part, value) for part in parts),
        "if": lambda part: not takes(part, value) or takes(node["then"], value),
        "type": lambda kind: kinds[kind],
        "enum": lambda known: value in known,
        "const": lambda known: value == known,
    }
    sized = {
        "number": {
            "minimum": lambda least: value >= least,
            "maximum": lambda most: value <= most,
            "exclusiveMinimum": lambda least: value > least,
            "exclusiveMaximum": lambda most: value < most,
        },
        "string": {
            "minLength": lambda least: len(value) >= least,
            "maxLength": lambda most: len(value) <= most,
            "pattern": lambda pattern: bool(re.search(pattern, value)),
        },
        "array": {
            "minItems": lambda least: len(value) >= least,
            "maxItems": lambda most: len(value) <= most,
            "prefixItems": lambda parts: all(map(takes, parts, value)),
            "items": lambda part: all(takes(part, item) for item in value),
        },
        "object": {
            "required": lambda names: set(names) <= set(value),
            "maxProperties": lambda most: len(value) <= most,
            "properties": lambda parts: all(takes(parts.get(n, True), v) for n, v in value.items()),
            "additionalProperties": lambda part: all(
                takes(part, v) for n, v in value.items() if n not in node.get("properties", {})
            ),
        },
    }
    for kind, more in sized.items():
        checks |= more if kinds[kind] else {}
    return all(check(node[word]) for word, check in checks.items() if word in node)


def loads(recipe, path):
    path.write_text(json.dumps(recipe).replace("Infinity", ".inf"))
    try:
        load_recipe(path, sections=workload_sections)
    except ConfigError:
        return False
    return True


def recipe_with(workload, key, value):
    recipe = {
        "workload": workload,
        "steps": 100,
        "batch_size": 2,
        **copy.deepcopy(NEEDED[workload]),
    }
    *sections, name = key
    if sections[:1] == ["strategy"]:  # plain training has none of its settings
        recipe["strategy"] = {"name": "hybrid", "preset": "aggressive"}
    here = recipe
    for section in sections:
        here = here.setdefault(section, {})
    here[name] = value
    return recipe


@pytest.mark.parametrize("workload", WORKLOADS)
def test_schema_and_loader_agree_about_every_setting(workload, tmp_path):
    sections = workload_sections(workload)
    differ = []
    for number, (key, _) in enumerate(leaves(recipe_tree(sections))):
        if workload != "tutorial" and key[0] not in sections.by_name:
            continue  # those are the same for all
        for value in VALUES[number % 3 :: 3]:  # each setting a third, each value a third of them
            recipe = recipe_with(workload, key, copy.deepcopy(value))
            fits, runs = takes(SCHEMA, recipe), loads(recipe, tmp_path / "r.yaml")
            if fits != runs and not (fits and ".".join(key) in TOGETHER):
                differ.append((".".join(key), str(value)[:40], f"schema {fits}, loader {runs}"))
    assert differ == []


@pytest.mark.parametrize("value", [None, {}, "none", 1, [], {"nothing": 1}])
def test_schema_and_loader_agree_about_every_section(value, tmp_path):
    for workload in WORKLOADS:
        keys = {key[:-1] for key, _ in leaves(recipe_tree(workload_sections(workload)))} - {()}
        for key in sorted(keys):
            recipe = recipe_with(workload, key, value)
            assert takes(SCHEMA, recipe) == loads(recipe, tmp_path / "r.yaml"), (key, value)


@pytest.mark.parametrize("workload", ["lm", "tutorial", "nothing", 3, None])
def test_schema_and_loader_agree_about_what_must_be_there(workload, tmp_path):
    for recipe in (
        {"workload": workload, "steps": 1, "batch_size": 1},
        {"workload": workload, "steps": 1},
        {"steps": 1, "batch_size": 1},
        {"workload": workload, "steps": 1, "batch_size": 1, "objective": {"size": 1.0}},
        {"workload": workload, "steps": 1, "batch_size": 1, "stesp": 1},
    ):
        assert takes(SCHEMA, recipe) == loads(recipe, tmp_path / "r.yaml"), recipe
