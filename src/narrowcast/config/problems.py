"""What is wrong with a recipe, said at once: the first few problems in words, the rest counted."""

from __future__ import annotations

from collections.abc import Callable
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


@final
class Problems:
    """Problems in the order they were found; what is not told is never put into words."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.count = 0

    def add(self, problem: str | Callable[[], str]) -> None:
        """Add one, or what would say it."""
        self.count += 1
        if len(self.shown) < MOST_TOLD:
            text = problem if isinstance(problem, str) else problem()
            self.shown.append(shortened(text, LONGEST_LINE))

    def __bool__(self) -> bool:
        return self.count > 0

    def lines(self) -> list[str]:
        """Return a line for each that is told, and one that counts the others."""
        more = self.count - len(self.shown)
        return [*self.shown, *([f"and {more} more"] if more else [])]
