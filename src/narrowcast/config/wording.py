"""Values as a recipe writes them, and which setting was meant, for error messages."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping

from narrowcast.config.problems import shortened
from narrowcast.config.tree import Tree, leaves
from narrowcast.config.yaml_text import KeyPath


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
