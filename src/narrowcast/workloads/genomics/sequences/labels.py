"""Labels per base, per token and per letter of a record."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.readers.record import Feature, Part, Record
from narrowcast.workloads.genomics.sequences.tokenizers import Ids, Spans

IGNORE = -100
"""torch's ignore_index."""
UNKNOWN = "-"
"""Marks a letter of unknown class, which is not trained on or evaluated."""


def base_labels(
    length: int,
    features: Iterable[Feature],
    classes: Mapping[str, int],
    *,
    circular: bool = False,
    location: str = "",
) -> Ids:
    """Return the class of each base, 0 outside of all features; later classes win overlaps."""
    labels = np.zeros(length, dtype=np.int64)
    by_kind: dict[str, list[Part]] = {}
    for feature in features:
        by_kind.setdefault(feature.kind, []).extend(feature.parts)
    where = location or "a sequence"
    for name, number in classes.items():
        # A kind of that very name, however it ends, comes before a strand.
        kind, strand = (name, 0) if name in by_kind else _kind_and_strand(name)
        for part in by_kind.get(kind, ()):
            if strand in (0, part.strand):
                _lay(labels, part, number, circular=circular, what=f"{where}: {kind}")
    return labels


def reversed_labels(labels: Ids, classes: Mapping[str, int]) -> Ids:
    """Return the labels of the reverse complement: reversed, `gene+` and `gene-` swapped."""
    labels = labels[::-1].copy()
    turned = labels.copy()
    for name, number in classes.items():
        other = {"+": "-", "-": "+"}.get(name[-1:])
        if other and name[:-1] + other in classes:
            turned[labels == number] = classes[name[:-1] + other]
    return turned


def token_labels(labels: Ids, spans: Spans) -> Ids:
    """Return the label of each token's middle base (of two, the left one); specials get IGNORE."""
    starts, ends = spans
    if len(ends) and int(ends.max()) > len(labels):
        raise ConfigError(
            f"labels must be one per letter; the tokens reach letter {int(ends.max())}, got "
            f"{len(labels)} labels."
        )
    real = ends > starts
    laid = np.full(len(starts), IGNORE, dtype=np.int64)
    laid[real] = labels[(starts[real] + ends[real] - 1) // 2]
    return laid


def base_values(values: NDArray[Any], spans: Spans, length: int) -> NDArray[Any]:
    """Return a value per base: that of the token whose middle is nearest (of two, the left one)."""
    starts, ends = spans
    real = ends > starts
    values, starts, ends = values[real], starts[real], ends[real]
    if not len(starts):
        if length:
            raise ConfigError(
                f"There are no tokens with letters, but {length} letters need values."
            )
        return values
    middles = starts + ends - 1  # in halves of a letter
    borders = (middles[:-1] + middles[1:]) / 2
    return values[np.searchsorted(borders, 2 * np.arange(length), side="left")]


def letter_labels(record: Record, column: str, classes: Sequence[str]) -> Ids:
    """Return class numbers of a record's letters from a list, one sign per letter, or words.

    `-`, or null in a list, becomes IGNORE unless a class has that name.
    """
    value = record.fields[column]
    if isinstance(value, str) and len(value.split()) > 1:
        value = value.split()
    items = list(value) if isinstance(value, str | list) else None
    if items is None or len(items) != len(record.sequence):
        count = "no list" if items is None else f"{len(items)}"
        raise ConfigError(
            f"{record.location}: {column} must have one label for each of {len(record.sequence)} "
            f"letters, got {count}."
        )
    if all(isinstance(item, str) for item in items):
        # A genome has millions of letters, and few classes.
        numbers = {item: _letter(item, column, classes, record) for item in dict.fromkeys(items)}
        return np.array([numbers[item] for item in items], dtype=np.int64)
    return np.array([_letter(item, column, classes, record) for item in items], dtype=np.int64)


def _kind_and_strand(name: str) -> tuple[str, int]:
    strand = {"+": 1, "-": -1}.get(name[-1:], 0)
    return (name[:-1], strand) if strand else (name, 0)


def _lay(labels: Ids, part: Part, number: int, *, circular: bool, what: str) -> None:
    length = len(labels)
    start, end = part.start, part.end
    if start < 0 or start >= length or (end > length and (not circular or end - start > length)):
        raise ConfigError(
            f"{what} at {start + 1} to {end} is outside its {length} letters. Give the sequence "
            "that the features belong to, or mark it as circular."
        )
    labels[start : min(end, length)] = number
    labels[: max(end - length, 0)] = number


def _letter(value: Any, column: str, classes: Sequence[str], record: Record) -> int:
    unknown = value is None or (value == UNKNOWN and UNKNOWN not in classes)
    return IGNORE if unknown else _class(value, column, classes, record)


def _class(value: Any, column: str, classes: Sequence[str], record: Record) -> int:
    if isinstance(value, str) and value in classes:
        return classes.index(value)
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(classes):
        return number
    raise ConfigError(
        f"{record.location}: {column} must be one of {shortened(', '.join(classes), 200)}, or "
        f"their numbers from 0, got {shortened(repr(value))}."
    )
