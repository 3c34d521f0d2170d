"""From the table of given settings to a recipe, or to everything that is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from narrowcast.config.overrides import COMMAND_LINE, Overrides, Setting
from narrowcast.config.problems import closest, shown, written
from narrowcast.config.sections import CommonSettings, Recipe, Sections
from narrowcast.config.tree import leaves, literal_values, section_in
from narrowcast.config.yaml_text import KeyPath, parse_scalar


def validate(overrides: Overrides, sections: Sections, *, shown_as: str) -> Recipe | None:
    """Build the recipe, or add what is wrong to `overrides.problems`.

    pydantic checks settings against each other only where each is valid alone. So wrong settings
    are left out and the rest is checked again, until no new problem appears.
    """
    wrong: set[KeyPath] = set()
    while True:
        valid = {path: s for path, s in overrides.settings.items() if path not in wrong}
        parts, errors = _attempt(valid, sections)
        if not errors:
            return _whole(parts)
        explained = _explained(errors, overrides, shown_as=shown_as)
        fresh = [(keys, text) for keys, text in explained if not keys & wrong]
        if not fresh:
            return None
        for keys, text in fresh:
            overrides.problems.add(text)
            wrong |= keys


def _attempt(
    settings: Mapping[KeyPath, Setting], sections: Sections
) -> tuple[dict[str, BaseModel], list[ErrorDetails]]:
    """Validate the common settings and the workload's sections each for itself."""
    values = _nested(settings)
    own = {name: values.pop(name, {}) for name in sections.by_name}
    todo: dict[str, tuple[type[BaseModel], object]] = {"": (CommonSettings, values)}
    todo |= {name: (kind, own[name]) for name, kind in sections.by_name.items()}
    parts: dict[str, BaseModel] = {}
    errors: list[ErrorDetails] = []
    for name, (kind, value) in todo.items():
        try:
            # As JSON, where strict still lets a list be a tuple and text be a path.
            parts[name] = kind.model_validate_json(json.dumps(value))
        except ValidationError as error:
            for details in error.errors(include_url=False):
                details["loc"] = (*filter(None, [name]), *details["loc"])
                errors.append(details)
    return parts, errors


def _nested(settings: Mapping[KeyPath, Setting]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for (*sections, name), setting in settings.items():
        here = root
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = setting.value
    return root


def _whole(parts: dict[str, BaseModel]) -> Recipe:
    common, own = parts[""], {name: part for name, part in parts.items() if name}
    values = {name: getattr(common, name) for name in CommonSettings.model_fields}
    data, model = own.pop("data"), own.pop("model")
    return Recipe.model_validate({**values, "data": data, "model": model, "further": own})


def _explained(
    errors: Iterable[ErrorDetails], overrides: Overrides, *, shown_as: str
) -> list[tuple[set[KeyPath], str]]:
    """Write pydantic's errors as messages, each with the settings that take part in it."""
    fields = dict(leaves(overrides.tree))
    problems: list[tuple[set[KeyPath], str]] = []
    # A setting of several types has an error per type.
    groups: dict[tuple[KeyPath, tuple[int | str, ...]], list[ErrorDetails]] = {}
    for error in errors:
        path = tuple(map(str, error["loc"]))
        if error["type"] == "conflict":
            for keys, text in error["ctx"]["conflicts"]:
                involved = [(*path, *key.split(".")) for key in keys] or [path]
                where, more = _where(involved, overrides, shown_as), ""
                if (field := fields.get(involved[0])) is not None:
                    more = _default_hint(involved, field, text, overrides)
                problems.append((set(involved), f"{where}: {text}{more}"))
            continue
        leaf = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in fields), path)
        setting = overrides.settings.get(leaf)
        position = _position(error, len(leaf), setting.value if setting else None)
        groups.setdefault((leaf, position), []).append(error)
    for (leaf, position), same in groups.items():
        where = _where([leaf], overrides, shown_as)
        text = _wrong(same, fields[leaf], leaf, position) if leaf in fields else same[0]["msg"]
        problems.append(({leaf}, f"{where}: {text}"))
    return problems


def _position(error: ErrorDetails, start: int, value: object) -> tuple[int | str, ...]:
    """Return the way from a setting to the entry that is wrong, without pydantic's type names."""
    position: list[int | str] = []
    for part in error["loc"][start:]:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(value, dict) and (part in value or error["type"] == "missing"):
            value = value.get(part)
        else:
            break
        position.append(part)
    return tuple(position)


def _where(paths: Sequence[KeyPath], overrides: Overrides, shown_as: str) -> str:
    """Return the beginning of a message about `paths`: the first of them that was set."""
    settings = [overrides.settings[path] for path in paths if path in overrides.settings]
    return settings[0].where if settings else f"{shown_as}: {'.'.join(paths[0])}"


def _default_hint(
    involved: Sequence[KeyPath], field: FieldInfo, text: str, overrides: Overrides
) -> str:
    """Return what to add on the command line where a file, perhaps shipped, has the setting."""
    first, *others = involved
    settings = overrides.settings
    if first not in settings or f"eave {first[-1]} out" not in text:
        return ""
    by_command_line = [settings[path].origin == COMMAND_LINE for path in others if path in settings]
    if settings[first].origin == COMMAND_LINE or not any(by_command_line):
        return ""
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return f" (or add '{'.'.join(first)}={default}')"


_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "missing": "a longer list",
}
"""Names of types; pydantic's messages use those of JSON."""
_BOUNDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}
"""Words that were booleans in YAML 1.1 and still are in people's fingers."""
_TEACHES_NOTHING: tuple[object, ...] = (None, "", (), {})
"""Defaults that do not show how a value is written."""


def _wrong(
    errors: Sequence[ErrorDetails], field: FieldInfo, leaf: KeyPath, position: Sequence[int | str]
) -> str:
    """Return what is wrong with a setting or an entry of it, and what to write."""
    section: type[BaseModel] | None = None
    for part in position:
        if isinstance(part, int):
            section = section_in(field.annotation)
        elif section is not None and part in section.model_fields:
            field, section = section.model_fields[part], None
    named = ": ".join(f"item {p + 1}" if isinstance(p, int) else p for p in position)
    here = f"{named} " if position else ""
    error = errors[0]
    match error["type"]:
        case "value_error" | "assertion_error":
            return here + error["msg"].partition(", ")[2]  # written by us
        case "missing" if position:
            example = f"{position[-1]}: {_example(field)}"
            return f"{here}is not set. Write {example} ({field.description})"
        case "missing" if not isinstance(error["input"], list):
            return f"not set. Write {'.'.join(leaf)}=VALUE ({field.description})"
        case "extra_forbidden" if section is not None:
            guess = closest(str(position[-1]), section.model_fields)
            names = ", ".join(section.model_fields)
            fix = f"Did you mean {guess}?" if guess else f"The settings are {names}"
            return f"{here}is not a setting. {fix}"
    several = len(errors) > 1 or error["type"] == "string_pattern_mismatch"
    takes = f"must be {field.description}" if several else _requirement(error)
    if type(None) in getattr(field.annotation, "__args__", ()) and not several:
        takes += ", or none"
    value = error["input"]
    hint = _hint(errors, field, section)
    if not hint and not position and not field.is_required():
        default = field.get_default(call_default_factory=True)
        if default not in _TEACHES_NOTHING:
            hint = f"Write e.g. {'.'.join(leaf)}={written(default)}"
    return f"{here}{takes}, got {shown(value)}" + (f". {hint}" if hint else "")


def _requirement(error: ErrorDetails) -> str:
    if error["type"] in _KINDS:
        return f"must be {_KINDS[error['type']]}"
    text = re.sub(r" after validation, not \d+", "", error["msg"])
    for long, short in _BOUNDS.items():
        text = text.replace(long, short)
    return re.sub(r"^\w+ should ", "must ", text)


def _hint(errors: Sequence[ErrorDetails], field: FieldInfo, section: type[BaseModel] | None) -> str:
    """Return what to write instead of a value, for the slips people make."""
    value, kinds = errors[0]["input"], {error["type"] for error in errors}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    choices = [each for error in errors for each in re.findall("'(.*?)'", error["msg"])]
    if isinstance(value, str) and (guess := closest(value, choices)):
        return f"Did you mean {guess}?"
    quoted = isinstance(value, str) and isinstance(parse_scalar(value), int | float)
    if quoted and kinds & {"int_type", "float_type"}:
        return "Leave out the quotes"
    if "string_type" in kinds and is_number:
        return f'Put it in quotes: "{value}"'
    if "bool_type" in kinds and (meaning := _YAML_1_1.get(str(value).lower())):
        return f"Write {meaning}"
    if "model_type" in kinds and section is not None:
        required = {name: f for name, f in section.model_fields.items() if f.is_required()}
        entry = ", ".join(f"{name}: {_example(each)}" for name, each in required.items())
        return f"Write {{{entry}}}" if entry else f"It has {', '.join(section.model_fields)}"
    return f"Write e.g. {field.examples[0]}" if field.examples else ""


def _example(field: FieldInfo) -> Any:
    """Return a value that a setting might have."""
    return (literal_values(field.annotation) or field.examples or ["VALUE"])[0]
