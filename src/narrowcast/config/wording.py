"""What a setting takes, and which setting was meant, in words for error messages."""

from __future__ import annotations

import difflib
import json
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from narrowcast.config.problems import shortened
from narrowcast.config.tree import Tree, leaves, literal_values, plain_types
from narrowcast.config.yaml_text import KeyPath


def needed(field: FieldInfo, got: object = None) -> str:
    """Say what values `field` takes: `a whole number of at least 1`.

    A bound far above what anybody means is said to who went beyond it with `got`, and to nobody
    else.
    """
    if any(getattr(bound, "pattern", None) for bound in field.metadata):
        return str(field.description)
    most = [bound for bound in field.metadata if isinstance(bound, annotated_types.Le)]
    number = isinstance(got, int | float) and not isinstance(got, bool)
    beyond = [bound for bound in most if number and got > bound.le]  # type: ignore[operator]
    near = [bound for bound in field.metadata if bound not in most or bound.le == 1]  # a share
    return _needed(field.annotation, beyond or near)


def shown(value: object) -> str:
    """Return `value` as somebody would write it in a recipe, shortened."""
    match value:
        case None:
            text = "none"
        case bool():
            text = str(value).lower()
        case float() if not math.isfinite(value):
            text = str(value).replace("inf", ".inf").replace("nan", ".nan")
        case float():
            text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        case str():
            text = repr(value)
        case list() | tuple():
            text = "[" + ", ".join(shown(item) for item in value) + "]"
        case _:
            text = json.dumps(value, default=str)
    return shortened(text)


def written(value: object) -> str:
    """Return `value` as it stands behind the = of a command line."""
    return shortened(value) if isinstance(value, str) else shown(value)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the name that `word` was probably meant to be."""
    names = list(known)
    folded = {name.lower(): name for name in names}
    if word.lower().replace("-", "_") in folded:
        return folded[word.lower().replace("-", "_")]
    matches = difflib.get_close_matches(word, names, n=1)
    return matches[0] if matches else None


def meant(path: KeyPath, at: int, tree: Tree) -> KeyPath | None:
    """Guess the setting meant by `path`, whose name number `at` is not one of its siblings'.

    `tree` is the whole recipe. The order of guesses: a setting of exactly this name in another
    section, a name like it beside it, a name like it in another section.
    """
    everywhere = [leaf for leaf, _ in leaves(tree)]
    rest = path[at:]
    elsewhere = [leaf for leaf in everywhere if leaf[-len(rest) :] == rest]
    if len(elsewhere) == 1:
        return elsewhere[0]
    siblings: Tree = tree
    for name in path[:at]:
        entry = siblings[name]
        siblings = entry if isinstance(entry, Mapping) else {}
    if sibling := closest(path[at], siblings):
        return (*path[:at], sibling, *path[at + 1 :])
    if len(rest) == 1 and (like := closest(rest[0], {leaf[-1] for leaf in everywhere})):
        result = [leaf for leaf in everywhere if leaf[-1] == like]
        return result[0] if len(result) == 1 else None
    return None


def _needed(annotation: object, bounds: Sequence[Any]) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        # What each part of a union takes, with bounds of its own; those of all of them come last.
        options = [part for part in get_args(annotation) if part is not type(None)]
        phrases = [_needed_item(option) for option in options]
    else:
        phrases = [_kind(*plain_types(annotation))]
    limits = " and ".join(filter(None, map(_limit, bounds)))
    whole = " or ".join(dict.fromkeys(phrases)) + (f" {limits}" if limits else "")
    return f"{whole}, or none" if type(None) in plain_types(annotation) else whole


_SIMPLE = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}


def _kind(option: Any) -> str:
    args = get_args(option)
    match get_origin(option):
        case None if isinstance(option, type) and issubclass(option, BaseModel):
            return f"a mapping with {_listed_fields(option)}"
        case None:
            return _SIMPLE.get(option, "another value")
        case origin if origin is Literal:
            return "one of " + ", ".join(str(choice) for choice in literal_values(option))
        case origin if origin is tuple and args[-1:] != (...,):
            return f"a list of {len(args)}: {_needed_item(args[0])} each"
        case origin if origin in (dict, Mapping):
            return f"a mapping of names to {_needed_item(args[1])}"
        case _:
            return f"a list: {_needed_item(args[0])} each"


def _listed_fields(model: type[BaseModel]) -> str:
    """Return the fields that must be there, or all where none must."""
    fields = model.model_fields.items()
    lines = [
        f"{name} ({choices})"
        if (choices := ", ".join(map(str, literal_values(field.annotation))))
        else name
        for name, field in fields
        if field.is_required()
    ]
    return ", ".join(lines or model.model_fields)


def _needed_item(annotation: Any) -> str:
    bounds: list[Any] = []
    if get_origin(annotation) is Annotated:
        for extra in get_args(annotation)[1:]:
            bounds += extra.metadata if isinstance(extra, FieldInfo) else [extra]
    return _needed(annotation, bounds)


def _limit(bound: object) -> str:
    match bound:
        case annotated_types.Ge(ge):
            return f"of at least {_number(ge)}"
        case annotated_types.Gt(gt):
            return f"above {_number(gt)}"
        case annotated_types.Le(le):
            return f"of at most {_number(le)}"
        case annotated_types.Lt(lt):
            return f"below {_number(lt)}"
        case annotated_types.MinLen(length):
            return "that is not empty" if length == 1 else f"of length {length} or more"
        case _:
            return ""


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
