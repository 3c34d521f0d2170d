"""The exact search: one choice per group, the least time under limits on loss and memory.

A multiple-choice knapsack, solved by adding one group at a time and dropping every partial policy
that another one beats in time, loss and memory alike (Nemhauser and Ullmann, 1969).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from narrowcast.errors import UnsupportedError

MOST_POINTS = 2_000_000
"""Partial policies held at once. Models of forty groups have needed a few thousand."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a choice costs: seconds and lost progress per step, and bytes of memory."""

    seconds: float
    loss: float
    """Share of a step's progress that is lost."""
    bytes: float = 0.0


class FrontPoint(NamedTuple):
    """A policy that no other beats: its costs, and the choice of each group by index."""

    seconds: float
    loss: float
    bytes: float
    choices: tuple[int, ...]


def pareto_front(
    groups: Sequence[Sequence[Cost]], *, most_loss: float, most_bytes: float
) -> list[FrontPoint]:
    """Return the policies within the limits that no other beats, the fastest first.

    Every policy within the limits is matched by one of them that is no worse in anything. Without
    a limit on memory (infinity), memory does not count. A choice with infinite loss is left out.
    """
    by_memory = most_bytes < inf
    rest_loss, rest_bytes = _least_after(groups)
    points: list[tuple[float, float, float, tuple[int, int]]] = [(0.0, 0.0, 0.0, (-1, -1))]
    history: list[list[tuple[int, int]]] = []
    for number, group in enumerate(groups):
        loss_left, bytes_left = most_loss - rest_loss[number], most_bytes - rest_bytes[number]
        grown = [
            (
                seconds + cost.seconds,
                loss + cost.loss,
                taken + cost.bytes if by_memory else 0.0,
                (before, index),
            )
            for before, (seconds, loss, taken, _) in enumerate(points)
            for index, cost in enumerate(group)
            if cost.loss < inf
            and loss + cost.loss <= loss_left
            and (not by_memory or taken + cost.bytes <= bytes_left)
        ]
        grown.sort()
        points = _undominated(grown)
        if len(points) > MOST_POINTS:
            raise UnsupportedError(
                f"The search has too many policies to compare, more than {MOST_POINTS:,}. Tune "
                "with fewer groups of layers."
            )
        history.append([origin for *_, origin in points])
    return [
        FrontPoint(seconds, loss, taken, _choices(history, index))
        for index, (seconds, loss, taken, _) in enumerate(points)
    ]


def _least_after(groups: Sequence[Sequence[Cost]]) -> tuple[list[float], list[float]]:
    """Return the least loss and memory that the groups after each one need."""
    loss, taken = [0.0], [0.0]
    for group in reversed(groups[1:]):
        loss.append(loss[-1] + min(cost.loss for cost in group))
        taken.append(taken[-1] + min(cost.bytes for cost in group))
    return loss[::-1], taken[::-1]


def _undominated(
    points: list[tuple[float, float, float, tuple[int, int]]],
) -> list[tuple[float, float, float, tuple[int, int]]]:
    """Return the points, sorted by time, that no earlier one beats in loss and memory.

    `losses` rises and `sizes` falls: the stairs below which a point is worth keeping.
    """
    stored = []
    losses: list[float] = []
    sizes: list[float] = []
    for point in points:
        _, loss, taken, _ = point
        place = bisect_right(losses, loss)
        if place and sizes[place - 1] <= taken:
            continue
        stored.append(point)
        start = end = bisect_left(losses, loss)
        while end < len(losses) and sizes[end] >= taken:
            end += 1
        losses[start:end], sizes[start:end] = [loss], [taken]
    return stored


def _choices(history: list[list[tuple[int, int]]], index: int) -> tuple[int, ...]:
    """Return the choices that led to a point, group by group."""
    chosen: list[int] = []
    for origins in reversed(history):
        index, choice = origins[index]
        chosen.append(choice)
    return tuple(reversed(chosen))
