"""What is wrong with one entry of a setting that is a list of sections, such as `faults`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from narrowcast.config.tree import choices_of, section_in
from narrowcast.config.wording import closest, needed, shown


def wrong_entry(error: ErrorDetails, field: FieldInfo, inside: Sequence[int | str]) -> str | None:
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
    guess = closest(str(error["input"]), map(str, choices_of(there.annotation)))
    return f"{text}; did you mean {guess}?" if guess else f"{text}; write {name}: {_value(there)}"


def _example(section: type[BaseModel]) -> str:
    """Return how an entry is written, with the settings that it must have."""
    required = {name: field for name, field in section.model_fields.items() if field.is_required()}
    return "{" + ", ".join(f"{name}: {_value(field)}" for name, field in required.items()) + "}"


def _value(field: FieldInfo) -> Any:
    """Return a value that a setting might have."""
    choices = choices_of(field.annotation)
    return (choices or field.examples or [needed(field)])[0]
