"""Predictions, one record after another: chances of classes, a value, or classes along it."""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from narrowcast.workloads.genomics.data.cutting import windows
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.inference.finished import Finished
from narrowcast.workloads.genomics.sequences.labels import base_values
from narrowcast.workloads.genomics.targets import Labels, Value

_Item = TypeVar("_Item")
Numbers = npt.NDArray[np.float64]


class Prediction(NamedTuple):
    """What is predicted of a record."""

    name: str
    values: Numbers
    """Chances, (classes,); a value, (1,); or chances along the record, (letters, classes)."""


def predictions(run: Finished, rows: Iterable[Row], *, batch_size: int) -> Iterator[Prediction]:
    """Yield a prediction for each row, in order."""
    for batch in batched(rows, batch_size):
        answers, _ = run.answers(batch)
        if isinstance(run.target, Value):
            result = answers.double() * run.target.spread + run.target.centre
        elif isinstance(run.target, Labels):
            result = answers.double().sigmoid()
        else:
            result = answers.double().softmax(-1)
        yield from map(Prediction, (row.name for row in batch), result.numpy())


def letter_predictions(
    run: Finished, rows: Iterable[Row], *, batch_size: int
) -> Iterator[Prediction]:
    """Yield the chances of each letter's classes, for whole records of any length.

    A record is read in windows as long as those the run was trained on, one beside another.
    """
    pieces = (
        (number, row.name, window)
        for number, row in enumerate(rows)
        for window in windows([row], run.info.max_length, None)
    )
    for (_, name), matched in groupby(
        _of_windows(run, pieces, batch_size), key=lambda each: each[0]
    ):
        yield Prediction(name, np.concatenate([chances for _, chances in matched]))


def _of_windows(
    run: Finished, pieces: Iterable[tuple[int, str, Row]], batch_size: int
) -> Iterator[tuple[tuple[int, str], Numbers]]:
    for batch in batched(pieces, batch_size):
        rows = [window for *_, window in batch]
        answers, tokens = run.answers(rows)
        chances = answers.double().softmax(-1).numpy()
        for at, (number, name, window) in enumerate(batch):
            own = chances[at, : len(tokens[at])]
            spans = run.tokenizer.token_spans(tokens[at])
            yield (number, name), base_values(own, spans, len(window.sequence))


def batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield items, so many at a time."""
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


class Interval(NamedTuple):
    """A stretch of a record that is of one class."""

    start: int
    """From 0."""
    end: int
    """Behind the last letter."""
    kind: int
    chance: float
    """The mean of its letters."""


def intervals(result: Numbers) -> Iterator[Interval]:
    """Yield the stretches of one class, whichever is likeliest at each letter."""
    kinds, chances = result.argmax(-1), result.max(-1)
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True):
        mean = float(chances[start:end].mean())
        yield Interval(int(start), int(end), int(kinds[start]), mean)
