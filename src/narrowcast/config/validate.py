"""From the table of given settings to a recipe, or to everything that is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from narrowcast.config.limits import MOST_TOLD
from narrowcast.config.overrides import COMMAND_LINE, Overrides, Setting
from narrowcast.config.sections import CommonSettings, Recipe, Sections
from narrowcast.config.tree import leaves, literal_values, plain_types, section_in
from narrowcast.config.wording import closest, needed, shown, written
from narrowcast.config.yaml_text import KeyPath, parse_scalar


def validate(overrides: Overrides, sections: Sections | None, *, shown_as: str) -> Recipe | None:
    """Build the recipe; where that fails, add what is wrong to `overrides.problems` instead.

    pydantic checks settings against each other only where each is fine alone. So a wrong setting is
    left out and the rest checked again, until no new problem appears; a setting that is known to
    be wrong is not reported twice.
    """
    explainer = _Explainer(overrides, shown_as)
    wrong: set[KeyPath] = set()
    while True:
        valid = {path: s for path, s in overrides.settings.items() if path not in wrong}
        parts, errors = _attempt(valid, sections)
        if not errors:
            return None if sections is None else _whole(parts)
        explained = [problem for error in errors for problem in explainer.explain(error)]
        fresh = [problem for problem in explained if not problem.keys & wrong]
        if not fresh:
            return None
        # Once each: a setting of several types is refused by pydantic once a type.
        for text in dict.fromkeys(problem.text for problem in fresh):
            overrides.problems.add(text)
        wrong.update(*(problem.keys for problem in fresh))


@dataclass(frozen=True)
class _Problem:
    keys: frozenset[KeyPath]
    """The settings that take part in it."""
    text: str


def _attempt(
    settings: Mapping[KeyPath, Setting], sections: Sections | None
) -> tuple[dict[str, BaseModel], list[ErrorDetails]]:
    """Validate the common settings and the workload's sections each for itself."""
    values = _nested(settings)
    known = {"data": None, "model": None} if sections is None else sections.by_name
    own = {name: values.pop(name, {}) for name in known}
    todo: dict[str, tuple[type[BaseModel], object]] = {"": (CommonSettings, values)}
    if sections is not None:
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


@dataclass(frozen=True)
class _Explainer:
    """Writes pydantic's errors as messages."""

    overrides: Overrides
    shown_as: str

    @cached_property
    def _fields(self) -> dict[KeyPath, FieldInfo]:
        return dict(leaves(self.overrides.tree))

    def explain(self, error: ErrorDetails) -> Iterator[_Problem]:
        path = tuple(map(str, error["loc"]))
        fields = self._fields
        if error["type"] == "conflict":
            for keys, text in error["ctx"]["conflicts"]:
                involved = [(*path, *key.split(".")) for key in keys] or [path]
                where, more = self._where(involved), self._taken_back(involved, text)
                yield _Problem(frozenset(involved), f"{where}: {text}{more}")
            return
        leaf = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in fields), path)
        keys = frozenset({leaf})
        if leaf not in self.overrides.settings:
            field = fields.get(leaf)
            text = _missing(leaf, field) if error["type"] == "missing" and field else error["msg"]
            yield _Problem(keys, f"{self._where([leaf])}: {text}")
            return
        setting = self.overrides.settings[leaf]
        if error["type"] in ("value_error", "assertion_error"):
            text = error["msg"].partition(", ")[2]  # said by us
        elif error["type"] in _TOO_LONG and len(error["input"]) > MOST_TOLD:
            text = _too_long(error)
        else:
            inside = error["loc"][len(leaf) :]
            entry = _wrong_entry(error, fields[leaf], inside)
            text = entry or _wrong(setting, fields[leaf], leaf)
        yield _Problem(keys, f"{setting.where}: {text}")

    def _taken_back(self, involved: list[KeyPath], text: str) -> str:
        """Say what to write instead of leaving out what a file has, which may be a shipped one."""
        first, *others = involved
        settings, field = self.overrides.settings, self._fields.get(first)
        if first not in settings or field is None or f"leave {first[-1]} out" not in text:
            return ""
        by_command_line = [
            settings[path].origin == COMMAND_LINE for path in others if path in settings
        ]
        if settings[first].origin == COMMAND_LINE or not any(by_command_line):
            return ""
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        return f" (or add '{'.'.join(first)}={default}')"

    def _where(self, paths: Iterable[KeyPath]) -> str:
        """Begin a message about `paths`, with the first of them that was given."""
        paths = list(paths)
        settings = [
            self.overrides.settings[path] for path in paths if path in self.overrides.settings
        ]
        return settings[0].where if settings else ": ".join([self.shown_as, ".".join(paths[0])])


def _missing(path: KeyPath, field: FieldInfo) -> str:
    key = ".".join(path)
    return f"not set; write {key}=VALUE, {needed(field)} ({field.description or key})"


_TOO_LONG = {"string_too_long": "characters", "too_long": "entries"}


def _too_long(error: ErrorDetails) -> str:
    """Say how long something is, and how long it may be."""
    what, most = _TOO_LONG[error["type"]], error["ctx"]["max_length"]
    return f"{len(error['input'])} {what} are too many; write at most {most}"


def _wrong(setting: Setting, field: FieldInfo, path: KeyPath) -> str:
    """Say what a setting takes, when it was given something else."""
    text = f"needs {needed(field, setting.value)}, got {shown(setting.value)}"
    choices = [str(choice) for choice in literal_values(field.annotation)]
    if isinstance(setting.value, str):
        if guess := closest(setting.value, choices):
            return f"{text}; did you mean {guess}?"
        if _is_number(parse_scalar(setting.value)) and {int, float} & set(_types(field)):
            return f"{text}; leave out the quotes"
    if str in _types(field) and _is_number(setting.value):
        return f'{text}; put it in quotes, "{setting.value}"'
    if bool in _types(field) and (meaning := _YAML_1_1.get(str(setting.value).lower())):
        return f"{text}; write {meaning}"
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return (
        text if default in _TEACHES_NOTHING else f"{text}; e.g. {'.'.join(path)}={written(default)}"
    )


_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}
"""Words that were booleans in YAML 1.1 and still are in people's fingers."""
_TEACHES_NOTHING: tuple[object, ...] = (None, "", (), {})
"""Defaults that do not show how a value is written."""


def _types(field: FieldInfo) -> list[Any]:
    return plain_types(field.annotation)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong_entry(error: ErrorDetails, field: FieldInfo, inside: Sequence[int | str]) -> str | None:
    """Say which field of which entry is wrong, and what to write; None where it is the whole list.

    `inside` is the way from the setting to what is wrong: the number of an entry, and a name.
    """
    section = section_in(field.annotation)
    match inside:
        case [int() as number, *rest] if section is not None:
            here = f"entry {number + 1}"
        case _:
            return None
    if not rest:
        return f"{here} is {shown(error['input'])}; write {_example(section)}"
    name = str(rest[0])
    there = section.model_fields.get(name)
    if there is None:
        guess = closest(name, section.model_fields)
        does = f"did you mean {guess}?" if guess else f"it has {', '.join(section.model_fields)}"
        return f"{here}: {name}: no such setting; {does}"
    if error["type"] == "missing":
        return f"{here} has no {name}; write {name}: {_value(there)} ({there.description})"
    text = f"{here}: {name} needs {needed(there, error['input'])}, got {shown(error['input'])}"
    guess = closest(str(error["input"]), map(str, literal_values(there.annotation)))
    return f"{text}; did you mean {guess}?" if guess else f"{text}; write {name}: {_value(there)}"


def _example(section: type[BaseModel]) -> str:
    """Return how an entry is written, with the settings that it must have."""
    required = {name: field for name, field in section.model_fields.items() if field.is_required()}
    return "{" + ", ".join(f"{name}: {_value(field)}" for name, field in required.items()) + "}"


def _value(field: FieldInfo) -> Any:
    """Return a value that a setting might have."""
    choices = literal_values(field.annotation)
    return (choices or field.examples or [needed(field)])[0]
