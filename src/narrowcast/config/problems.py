"""What is wrong with a recipe: the first few problems in words, the rest counted."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

from narrowcast.config.limits import MOST_TOLD

LONGEST_VALUE = 60
"""Characters of a value or a word that are shown."""
LONGEST_PATH = 200
"""Characters of a path."""
LONGEST_LINE = 1000
"""Characters of one problem; the longest lists all settings of a section."""


def shortened(text: str, longest: int = LONGEST_VALUE) -> str:
    """Return `text`, or its beginning where it is too long for a message."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def shown_path(path: str | Path) -> str:
    """Return a path as a message shows it: in one line, and not all of a long one."""
    text = str(path)
    return shortened(text if text.isprintable() else ascii(text)[1:-1], LONGEST_PATH)


def shown(value: object) -> str:
    """Return `value` as it is written in a recipe, shortened."""
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
    """Return `value` as it is written after = on the command line."""
    return shortened(value) if isinstance(value, str) else shown(value)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the name that `word` was probably meant to be."""
    names = list(known)
    folded = {name.lower(): name for name in names}
    if word.lower().replace("-", "_") in folded:
        return folded[word.lower().replace("-", "_")]
    matches = difflib.get_close_matches(word, names, n=1)
    return matches[0] if matches else None


@final
class Problems:
    """Problems in the order they were found; those that are not listed are never formatted."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.count = 0

    def add(self, problem: str | Callable[[], str]) -> None:
        """Add a problem, or a function that returns it."""
        self.count += 1
        if len(self.shown) < MOST_TOLD:
            text = problem if isinstance(problem, str) else problem()
            self.shown.append(shortened(text, LONGEST_LINE))

    def __bool__(self) -> bool:
        return self.count > 0

    def lines(self) -> list[str]:
        """Return a line per listed problem, and one that counts the others."""
        more = self.count - len(self.shown)
        return [*self.shown, *([f"and {more} more"] if more else [])]
