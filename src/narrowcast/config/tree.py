"""The settings of a recipe as a tree of names: what each takes, and which one was meant."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from narrowcast.config.problems import closest
from narrowcast.config.sections import CommonSettings, Sections
from narrowcast.config.yaml_text import KeyPath

Tree = Mapping[str, "Tree | FieldInfo"]
"""Name to setting or section."""

EXACT_INTEGERS = 2.0**53
"""Up to here every integer is a float, so `1e3` means exactly one whole number."""


def recipe_tree(sections: Sections) -> Tree:
    """Return the tree of a recipe with the sections of its workload."""
    own = {name: build_tree(section) for name, section in sections.by_name.items()}
    return {**build_tree(CommonSettings), **own}


def build_tree(model: type[BaseModel]) -> Tree:
    """Return the tree of one model; a field whose type is a model is a section."""
    return {
        name: build_tree(field.annotation) if _is_section(field.annotation) else field
        for name, field in model.model_fields.items()
    }


def leaves(tree: Tree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yield every setting of `tree`, with its path."""
    for name, entry in tree.items():
        if isinstance(entry, FieldInfo):
            yield (*path, name), entry
        else:
            yield from leaves(entry, (*path, name))


def meant(path: KeyPath, at: int, tree: Tree) -> KeyPath | None:
    """Return the setting that was meant by `path`, whose name number `at` does not exist."""
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


def fitted(value: object, annotation: object) -> object:
    """Return `value` in the type the setting takes: none for None, and 1e3 for a whole number."""
    options = plain_types(annotation)
    match value:
        case str() if value.lower() in ("none", "null") and type(None) in options:
            return value if value in literal_values(annotation) else None
        case float() if int in options and float not in options:
            whole = value.is_integer() and abs(value) <= EXACT_INTEGERS
            return int(value) if whole else value
        case list():
            return [fitted(item, _item_type(options, i)) for i, item in enumerate(value)]
        case dict() if any(map(_is_section, options)):
            fields = next(option for option in options if _is_section(option)).model_fields
            field_types = {name: field.annotation for name, field in fields.items()}
            return {key: fitted(item, field_types.get(key, object)) for key, item in value.items()}
        case dict():
            inner = entry_type(annotation) or object
            return {key: fitted(item, inner) for key, item in value.items()}
        case _:
            return value


def takes_text(value: object, annotation: object) -> bool:
    """Return whether a setting takes text, and takes nothing of the type `value` has."""
    options = plain_types(annotation)
    text = any(option in (str, Path) or get_origin(option) is Literal for option in options)
    kinds = {get_origin(option) or option for option in options}
    sequence = isinstance(value, list) and bool(kinds & {list, tuple, set, frozenset, Sequence})
    mapping = isinstance(value, dict) and bool(kinds & {dict, Mapping})
    number = type(value) is int and float in kinds
    return text and not (sequence or mapping or number or type(value) in kinds)


def entry_type(annotation: object) -> object | None:
    """Return the type of the values of a mapping; None if the setting is not a mapping."""
    for option in plain_types(annotation):
        if get_origin(option) in (dict, Mapping):
            entry: object = get_args(option)[1]
            return entry
    return None


def literal_values(annotation: object) -> tuple[Any, ...]:
    """Return the values of the Literals in `annotation`."""
    literals = (o for o in plain_types(annotation) if get_origin(o) is Literal)
    return tuple(choice for literal in literals for choice in get_args(literal))


def plain_types(annotation: object) -> list[Any]:
    """Return the plain types a value may have, without unions, aliases and Annotated."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return plain_types(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in plain_types(part)]
    return [annotation]


def section_in(annotation: object) -> type[BaseModel] | None:
    """Return the section class of the items of a list; None if they are not sections."""
    item = _item_type(plain_types(annotation), 0)
    return item if _is_section(item) else None


def _is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _item_type(options: list[Any], index: int) -> object:
    """Return the type of item `index` of the list or tuple among `options`."""
    for option in options:
        args = get_args(option)
        origin = get_origin(option)
        if origin is tuple and args[-1:] != (...,):
            return args[index] if index < len(args) else object
        if origin in (list, tuple, set, frozenset, Sequence):
            return args[0]
    return object
