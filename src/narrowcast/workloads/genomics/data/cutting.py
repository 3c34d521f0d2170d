"""Rows cut to what a network takes: windows of genomes, ends of sequences, both strands."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.sequences.alphabets import Alphabet
from narrowcast.workloads.genomics.sequences.labels import reversed_labels
from narrowcast.workloads.genomics.sequences.operations import reverse_complement, sliding_windows


def windows(rows: Sequence[Row], length: int, stride: int | None) -> list[Row]:
    """Cut long rows to windows of `length` letters, `stride` apart; the last may be shorter."""
    return [window for row in rows for window in _windows(row, length, stride or length)]


def _windows(row: Row, length: int, stride: int) -> Iterator[Row]:
    if len(row.sequence) <= length:
        yield row
        return
    for start, text in sliding_windows(row.sequence, length, stride):
        yield _part(row, slice(start, start + len(text)), start=row.start + start)


def _part(row: Row, part: slice, *, start: int = 0) -> Row:
    """Return some letters of a row, with their classes."""
    letters = None if row.letters is None else row.letters[part]
    sequence, alternative = row.sequence[part], row.alternative[part]
    return replace(row, sequence=sequence, alternative=alternative, letters=letters, start=start)


def held_out_tails(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Split genomes: the last `share` of the letters of each is judged on, the rest learnt.

    Windows are cut afterwards, so that none of them reaches over.
    """
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
    """Split rows into what is learnt and what is judged on.

    Of those of more than `longest` letters the last ones are judged on, as of a genome. The others,
    plasmids beside it, stay whole, and those of one sequence are on one side; so are variants of
    one site.
    """
    long = [row for row in rows if longest is not None and len(row.sequence) > longest]
    short = [row for row in rows if longest is None or len(row.sequence) <= longest]
    pairs = zip(held_out_tails(long, share), _split_whole(short, share, seed=seed), strict=True)
    learnt, judged = (ends + whole for ends, whole in pairs)
    return learnt, judged


def _split_whole(rows: Sequence[Row], share: float, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows by their sequences: those of one sequence, or of one site, are on one side."""
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
    """Return the rows whose sequences are not judged on."""
    known = {(row.sequence, row.alternative) for row in judged}
    return [row for row in rows if (row.sequence, row.alternative) not in known]


def shortened(rows: Sequence[Row], length: int) -> tuple[list[Row], int]:
    """Return rows of at most `length` letters, and how many were cut.

    A pair keeps the letters around what differs, others their beginning.
    """
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
    """Return the first letter in which a pair differs; the beginning where there is no pair."""
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
    """Return every row twice, the second time as the other strand reads.

    Of the classes of letters, those of one strand (`gene+`) become those of the other (`gene-`).
    """
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
