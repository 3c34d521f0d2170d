"""Rows of data: labels and classes, splitting, cutting, both strands."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from narrowcast.config.limits import LARGEST_FP32
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import Alphabet
from narrowcast.workloads.genomics.sequences.labels import reversed_labels
from narrowcast.workloads.genomics.sequences.operations import reverse_complement, sliding_windows
from narrowcast.workloads.genomics.settings import MOST_CLASSES

Numbers: TypeAlias = npt.NDArray[np.int64]

UNLABELLED = -100
"""Class of unlabelled letters, torch's ignore_index."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A sequence with its label."""

    sequence: str
    label: str = ""
    """A class, several joined with `;`, or a number; empty if letters have classes."""
    alternative: str = ""
    """The sequence with the variant, if rows are pairs."""
    letters: Numbers | None = None
    """Class number of every letter."""
    site: str = ""
    """Position of its variant on a reference; splits keep one site on one side."""
    name: str = ""
    start: int = 0
    """Offset of the row in its record."""
    location: str = ""
    """File and record, for error messages."""

    @property
    def title(self) -> str:
        """Name in reports, with the offset in its record."""
        return f"{self.name}:{self.start + 1}" if self.start else self.name


def collect_classes(rows: Sequence[Row], known: Sequence[str], *, several: bool) -> tuple[str, ...]:
    """Return `known` if it covers all classes of `rows`, else their classes in order."""
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
    """Return the class number of each row; raise for an unknown class."""
    numbers = {name: number for number, name in enumerate(classes)}
    _check_known([(row, row.label) for row in rows if row.label not in numbers], classes)
    return np.array([numbers[row.label] for row in rows], dtype=np.int64)


def label_table(rows: Sequence[Row], classes: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return a multi-hot table of labels, (rows, classes)."""
    numbers = {name: number for number, name in enumerate(classes)}
    named = [(row, name) for row in rows for name in row_classes(row, several=True)]
    _check_known([(row, name) for row, name in named if name not in numbers], classes)
    table = np.zeros((len(rows), len(classes)), dtype=np.float32)
    for at, row in enumerate(rows):
        table[at, [numbers[name] for name in row_classes(row, several=True)]] = 1
    return table


def row_values(rows: Sequence[Row]) -> npt.NDArray[np.float32]:
    """Return the numeric label of each row; raise if it is not a finite number."""
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


def windows(rows: Sequence[Row], length: int, stride: int | None) -> list[Row]:
    """Cut long rows into windows, `stride` apart; the last may be shorter."""
    return [
        _part(row, slice(start, start + len(text)), start=row.start + start)
        for row in rows
        for start, text in sliding_windows(row.sequence, length, stride or length)
    ]


def _part(row: Row, part: slice, *, start: int = 0) -> Row:
    """Return a slice of a row."""
    letters = None if row.letters is None else row.letters[part]
    sequence, alternative = row.sequence[part], row.alternative[part]
    return replace(row, sequence=sequence, alternative=alternative, letters=letters, start=start)


def held_out_tails(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Hold out the last `share` of each genome, before windows are cut."""
    learnt, judged = list[Row](), list[Row]()
    for row in rows:
        cut = round(len(row.sequence) * (1 - share))
        for part, into in ((slice(0, cut), learnt), (slice(cut, len(row.sequence)), judged)):
            if part.start < part.stop:
                into.append(_part(row, part, start=part.start))
    return learnt, judged


def split_rows(
    rows: Sequence[Row], share: float, *, seed: int, longest: int | None = None
) -> tuple[list[Row], list[Row]]:
    """Split rows into training and validation; rows over `longest` letters like genomes."""
    long = [row for row in rows if longest is not None and len(row.sequence) > longest]
    short = [row for row in rows if longest is None or len(row.sequence) <= longest]
    pairs = zip(held_out_tails(long, share), _split_whole(short, share, seed=seed), strict=True)
    learnt, judged = (ends + whole for ends, whole in pairs)
    return learnt, judged


def _split_whole(rows: Sequence[Row], share: float, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows so that equal sequences, and variants of one site, stay on one side."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kind = (row.site,) if row.site else (row.sequence, row.alternative)
        groups.setdefault(kind, []).append(row)
    order = np.random.default_rng(seed).permutation(len(groups))
    most, judged, learnt = round(len(rows) * share), list[Row](), list[Row]()
    kinds = list(groups.values())
    for number in order:
        (judged if len(judged) < most else learnt).extend(kinds[number])
    return learnt, judged


def without(rows: Sequence[Row], judged: Sequence[Row]) -> list[Row]:
    """Return the rows whose sequences are not among `judged`."""
    known = {(row.sequence, row.alternative) for row in judged}
    return [row for row in rows if (row.sequence, row.alternative) not in known]


def shortened(rows: Sequence[Row], length: int) -> tuple[list[Row], int]:
    """Return rows cut to `length` letters (pairs around the difference), and how many were cut."""
    out, cut = [], 0
    for row in rows:
        longest = max(len(row.sequence), len(row.alternative))
        if longest <= length:
            out.append(row)
            continue
        cut += 1
        start = min(max(_difference(row) - length // 2, 0), longest - length)
        out.append(_part(row, slice(start, start + length)))
    return out, cut


def _difference(row: Row) -> int:
    """Return the first position in which a pair differs; 0 without a pair."""
    if not row.alternative:
        return 0
    fewer = min(len(row.sequence), len(row.alternative))
    one, two = (
        np.frombuffer(text[:fewer].encode(), dtype=np.uint8)
        for text in (row.sequence, row.alternative)
    )
    differ = one != two
    return int(differ.argmax()) if differ.any() else fewer


def both_strands(rows: Sequence[Row], alphabet: Alphabet, classes: Sequence[str]) -> list[Row]:
    """Return every row and its reverse complement; classes `gene+` and `gene-` swap."""
    numbers = {name: number for number, name in enumerate(classes)}
    turned = [
        replace(
            row,
            sequence=reverse_complement(row.sequence, alphabet),
            alternative=reverse_complement(row.alternative, alphabet),
            letters=None if row.letters is None else reversed_labels(row.letters, numbers),
            name=f"{row.name} (reverse)",
        )
        for row in rows
    ]
    return [*rows, *turned]
