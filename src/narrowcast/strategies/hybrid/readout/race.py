"""Compares candidate weights on the same few held-out batches, within a budget.

Their difference varies far less between batches than their losses, so a few batches are enough.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import stdev
from typing import Literal, TypeVar

from narrowcast.errors import ConfigError
from narrowcast.strategies.hybrid.jumper import FEWEST_PAIRS, student_quantile

RISK = 0.05
"""Probability of dropping a candidate that is as good as the best, at each check."""

Better = Literal["lower", "higher"]
B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Race:
    """Measurements of each candidate by batch, and those left at the end."""

    seen: Mapping[str, Sequence[float]]
    """Metric of each batch by the candidate's name; all start with the same batches."""
    left: Sequence[str]
    """Candidates that none was clearly better than; they have the same batches."""
    passes: int
    """Forward passes spent, including batches with no finite metric."""

    @property
    def batches(self) -> dict[str, int]:
        return {name: len(each) for name, each in self.seen.items()}

    def means(self) -> dict[str, float]:
        return {name: mean(self.seen[name]) for name in self.left}

    def scores(self, chosen: str, *, at: float | None = None) -> dict[str, float]:
        """Return scores if `chosen` scores `at`; others differ as on shared batches."""
        own = self.seen[chosen]
        at = mean(own) if at is None else at
        differences = {
            name: mean([other - one for other, one in zip(each, own, strict=False)])
            for name, each in self.seen.items()
            if name != chosen
        }
        return {name: at + differences.get(name, 0.0) for name in self.seen}


def race(
    names: Sequence[str],
    look: Callable[[str, Sequence[B]], Sequence[float]],
    *,
    batches: Iterable[B],
    passes: float,
    better: Better,
) -> Race:
    """Compare candidates on batches with at most so many forward passes.

    Every eight batches, candidates that are clearly behind the best are dropped.
    """
    seen = {name: list[float]() for name in names}
    nothing_learned = {name: list[float]() for name in names}
    left, stream, spent, learned = list(names), iter(batches), 0, False
    while len(left) > 1 or not learned:
        affordable = int((passes - spent) / len(left))
        # One more batch if none had a finite metric yet, up to a limit: a run may have diverged.
        owed = not learned and len(nothing_learned[names[0]]) < FEWEST_PAIRS
        chunk = list(islice(stream, min(FEWEST_PAIRS, max(affordable, int(owed)))))
        if not chunk:
            break
        looks = {name: look(name, chunk) for name in left}
        spent += len(chunk) * len(left)
        for values in zip(*looks.values(), strict=True):
            # A batch whose metric is finite for no candidate says nothing about them.
            target = seen if any(map(math.isfinite, values)) else nothing_learned
            for name, value in zip(looks, values, strict=True):
                target[name].append(value)
        learned = any(seen.values())
        if learned:
            left = _not_beaten({name: seen[name] for name in left}, better=better)
    if not spent:
        raise ConfigError(
            "Selecting weights needs at least one batch, got none. Pass batches anew at every call."
        )
    return Race(seen=seen if learned else nothing_learned, left=left, passes=spent)


def _not_beaten(seen: Mapping[str, Sequence[float]], *, better: Better) -> list[str]:
    """Return the candidates that the best is not clearly ahead of; all if none is finite."""
    sign = 1 if better == "lower" else -1
    means = {name: sign * mean(each) for name, each in seen.items()}
    finite = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if not finite:
        return list(seen)
    best = min(finite, key=lambda name: finite[name])
    rivals = max(1, len(finite) - 1)
    return [
        name
        for name in finite
        if not _is_behind(
            [sign * (a - b) for a, b in zip(seen[name], seen[best], strict=True)], rivals=rivals
        )
    ]


def _is_behind(differences: Sequence[float], *, rivals: int) -> bool:
    """Return whether differences are significantly above zero, one-sided."""
    if len(differences) < FEWEST_PAIRS:
        return False
    error = stdev(differences) / math.sqrt(len(differences))
    return (
        mean(differences)
        > student_quantile(1 - RISK / rivals, freedom=len(differences) - 1) * error
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN if a value is; `statistics.fmean` may raise for infinities."""
    return sum(values) / len(values)
