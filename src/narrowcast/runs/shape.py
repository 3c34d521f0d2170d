"""Checks that plain data from a file has the expected shape.

A shape is a type, a tuple of alternatives, `[shape]` for a list, a longer list for one of that
length, or a dict of shapes by key, in which `ANY` stands for all other keys. Keys may be missing.
"""

from __future__ import annotations

from typing import Any, TypeAlias

ANY = "*"
DEEPEST = 50
"""Deepest nesting that is read; our files have five levels."""
LARGEST = 2**63
"""Largest step, count or size; of 10**400 no float can be made."""

Shape: TypeAlias = Any


def misfit(value: Any, shape: Shape, where: str = "it") -> str | None:
    """Return what in `value` does not have `shape`, as text, or None."""
    match shape:
        case dict():
            if not isinstance(value, dict):
                return f"{where} is not a mapping"
            others = shape.get(ANY, object)
            inside = [(key, item, shape.get(key, others)) for key, item in value.items()]
        case list():
            if not isinstance(value, list):
                return f"{where} is not a list"
            each = shape * len(value) if len(shape) == 1 else shape
            if len(each) != len(value):
                return f"{where} is not a list of {len(each)}"
            inside = [
                (f"entry {i + 1}", *pair) for i, pair in enumerate(zip(value, each, strict=True))
            ]
        case tuple():
            if any(misfit(value, each) is None for each in shape):
                return None
            return f"{where} is not {' or '.join(map(_name, shape))}"
        case _:
            # To Python, true is a whole number.
            return None if shape in (object, type(value)) else f"{where} is not {_name(shape)}"
    prefix = "" if where == "it" else f"{where}: "
    result = (misfit(item, s, f"{prefix}{str(key)[:80]}") for key, item, s in inside)
    return next((each for each in result if each), None)


def unreadable(value: Any) -> str | None:
    """Return what cannot be read, as text, or None: nesting without end, numbers without bounds."""
    level = [value]
    for _ in range(DEEPEST):
        inside: list[Any] = []
        for each in level:
            match each:
                case dict():
                    inside += each.values()
                case list():
                    inside += each
                case int() if abs(each) > LARGEST:
                    return "it has a whole number above 2**63"
        if not inside:
            return None
        level = inside
    return f"it is nested more than {DEEPEST} levels deep"


def _name(shape: Shape) -> str:
    return _NAMES[shape if isinstance(shape, type) else type(shape)]


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}
