"""Shortens long series for drawing, and keeps extremes, gaps and skipped steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from narrowcast.runs.records import StepRecord

MOST_POINTS = 2000
MOST_MARKS = 5000


@dataclass(frozen=True)
class Series:
    """Values over steps; `None` is a gap, where the value was not finite."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> tuple[float, ...]:
        return tuple(y for y in self.values if y is not None)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Skipped steps in a row that share a reason and a loss scale, or several such rows."""

    first: int
    last: int
    why: str
    loss_scale: float
    steps: int
    """How many they are."""


def series(steps: Sequence[int], values: Sequence[float | None]) -> Series:
    """Pair steps with values, and turn what is absent or not finite into gaps."""
    return Series(
        steps=tuple(steps),
        values=tuple(y if y is not None and math.isfinite(y) else None for y in values),
    )


def thinned(whole: Series, most: int = MOST_POINTS) -> Series:
    """Return at most `most` points: the least, the greatest and one gap per stretch of steps."""
    n = len(whole.steps)
    if n <= most:
        return whole
    # Three points per stretch at most; two places are held for the first and the last point.
    stretches = max(1, (most - 2) // 3)
    stored = {0, n - 1}
    for k in range(stretches):
        stored.update(_telling(whole.values, k * n // stretches, (k + 1) * n // stretches))
    order = sorted(stored)
    return Series(
        steps=tuple(whole.steps[i] for i in order),
        values=tuple(whole.values[i] for i in order),
    )


def changes(whole: Series) -> Series:
    """Return the first point, the last one, and those where the value changes."""
    n = len(whole.steps)
    saved = [i for i in range(n) if i in (0, n - 1) or whole.values[i] != whole.values[i - 1]]
    return Series(
        steps=tuple(whole.steps[i] for i in saved),
        values=tuple(whole.values[i] for i in saved),
    )


def smoothing_window(n: int) -> int:
    """Choose the odd number of steps to smooth over: a twenty-fifth of the run, 1001 at most."""
    return 2 * min(n // 50, 500) + 1


def smoothed(whole: Series, window: int, *, most: int = MOST_POINTS // 2) -> Series:
    """Return medians over `window` steps, centred so that the curve does not lag behind."""
    n = len(whole.steps)
    at = range(n) if n <= most else [k * (n - 1) // (most - 1) for k in range(most)]
    middles: list[float | None] = []
    for i in at:
        reach = min(window // 2, i, n - 1 - i)
        finite = [y for y in whole.values[i - reach : i + reach + 1] if y is not None]
        middles.append(median(finite) if finite else None)
    return Series(steps=tuple(whole.steps[i] for i in at), values=tuple(middles))


def skip_marks(steps: Sequence[StepRecord]) -> list[Mark]:
    """Collect every skipped step; neighbours alike in reason and scale become one mark."""
    marks: list[Mark] = []
    for record in steps:
        if not record.applied:
            add_mark(marks, record, why=record.skip_reason)
    return marks


def add_mark(marks: list[Mark], record: StepRecord, *, why: str) -> None:
    """Add a skipped step to the last mark if it continues it, or as a mark of its own."""
    step, scale = record.step, record.loss_scale
    last = marks[-1] if marks else None
    if last and (last.last, last.why, last.loss_scale) == (step - 1, why, scale):
        marks[-1] = replace(last, last=step, steps=last.steps + 1)
    else:
        marks.append(Mark(first=step, last=step, why=why, loss_scale=scale, steps=1))


def drawn(marks: Sequence[Mark], most: int = MOST_MARKS) -> list[Mark]:
    """Return at most `most` marks for all skipped steps; neighbours are joined."""
    if len(marks) <= most:
        return list(marks)
    cuts = [i * len(marks) // most for i in range(most + 1)]
    return [
        replace(marks[a], last=marks[b - 1].last, steps=sum(mark.steps for mark in marks[a:b]))
        for a, b in pairwise(cuts)
    ]


def _telling(values: Sequence[float | None], start: int, stop: int) -> set[int]:
    finite = [(y, i) for i, y in enumerate(values[start:stop], start) if y is not None]
    telling = {min(finite)[1], max(finite)[1]} if finite else set()
    if len(finite) < stop - start:
        telling.add(next(i for i in range(start, stop) if values[i] is None))
    return telling
