"""One sequence and what is to be predicted of it, as a file has it or as it was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from narrowcast.config.limits import LARGEST_FP32
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.labels import MOST_CLASSES

Numbers: TypeAlias = npt.NDArray[np.int64]

UNLABELLED = -100
"""The class of a letter that is not judged: torch's own."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A sequence with its label; where it came from is for whoever has to mend it."""

    sequence: str
    label: str = ""
    """A class, several joined with `;`, or a number; empty where letters have their own."""
    alternative: str = ""
    """The sequence with its variant, where a pair is judged."""
    letters: Numbers | None = None
    """The class of every letter, by number."""
    site: str = ""
    """Where its variant lies on a reference: those of one site see the same surroundings."""
    name: str = ""
    start: int = 0
    """Letters of its record before its first."""
    location: str = ""
    """File and record, for messages."""

    @property
    def title(self) -> str:
        """What a report calls it: its name, and where in its record it begins."""
        return f"{self.name}:{self.start + 1}" if self.start else self.name


def collect_classes(rows: Sequence[Row], known: Sequence[str], *, several: bool) -> tuple[str, ...]:
    """Return the classes of `rows`: the known ones where they hold all, else those found, in order.

    Numbers are in the order of numbers, else it is alphabetical.
    """
    matches = {name for row in rows for name in row_classes(row, several=several)}
    if matches <= set(known):
        return tuple(known)
    if len(matches) > MOST_CLASSES:
        raise ConfigError(
            f"There must be at most {MOST_CLASSES:,} classes, got {len(matches):,}. To predict "
            "numbers, write objective.target=value. To use another column, write data.label."
        )
    if all(name.isdecimal() for name in matches):
        return tuple(sorted(matches, key=lambda name: (int(name), name)))
    return tuple(sorted(matches))


def row_classes(row: Row, *, several: bool) -> list[str]:
    """Return the classes of a row."""
    if not several:
        return [row.label]
    return [name.strip() for name in row.label.split(";") if name.strip()]


def class_numbers(rows: Sequence[Row], classes: Sequence[str]) -> Numbers:
    """Return the class of each row by number; refuse one that is not among them."""
    numbers = {name: number for number, name in enumerate(classes)}
    _check_known([(row, row.label) for row in rows if row.label not in numbers], classes)
    return np.array([numbers[row.label] for row in rows], dtype=np.int64)


def label_table(rows: Sequence[Row], classes: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return for each row which labels it has, (rows, classes)."""
    numbers = {name: number for number, name in enumerate(classes)}
    named = [(row, name) for row in rows for name in row_classes(row, several=True)]
    _check_known([(row, name) for row, name in named if name not in numbers], classes)
    table = np.zeros((len(rows), len(classes)), dtype=np.float32)
    for at, row in enumerate(rows):
        table[at, [numbers[name] for name in row_classes(row, several=True)]] = 1
    return table


def row_values(rows: Sequence[Row]) -> npt.NDArray[np.float32]:
    """Return the number of each row; refuse a label that is none."""
    values = np.empty(len(rows), dtype=np.float32)
    for at, row in enumerate(rows):
        try:
            value = float(row.label)
        except ValueError as error:
            raise ConfigError(
                f"{row.location}: the label must be a number, got {row.label!r:.40}. Write "
                "objective.target=class, or name another column with data.label."
            ) from error
        if not abs(value) <= LARGEST_FP32:
            raise ConfigError(
                f"{row.location}: the label must be finite in fp32, got {row.label!r:.40}. Remove "
                "the row."
            )
        values[at] = value
    return values


def _check_known(strange: Sequence[tuple[Row, str]], classes: Sequence[str]) -> None:
    if not strange:
        return
    row, name = strange[0]
    shown = ", ".join(classes[:12]) + (", …" if len(classes) > 12 else "")
    raise ConfigError(
        f"{row.location}: the class must be one of {shown}, got {name!r:.60}"
        f"{f' (and {len(strange) - 1} more rows like it)' if len(strange) > 1 else ''}. Name all "
        "classes with objective.labels, or fix the file."
    )
