"""Read-outs compared on the same few held-out batches, until what may be spent is, or one has won.

What two read-outs differ by on one batch varies far less than their losses do from batch to batch.
So few batches tell which is better where it matters, and where they do not, it matters little.
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
"""The chance, whenever it is asked, that a read-out is dropped which is as good as the best."""

Better = Literal["lower", "higher"]
B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Race:
    """What was seen of each, batch by batch, and who was still in it at the end."""

    seen: Mapping[str, Sequence[float]]
    """The measure of each batch by the name of the read-out; all begin with the same batches."""
    left: Sequence[str]
    """Those that none was clearly better than: they have seen the same batches."""
    passes: int
    """Forward passes that it took, those of batches that told nothing included."""

    @property
    def batches(self) -> dict[str, int]:
        """How many batches each was judged on."""
        return {name: len(each) for name, each in self.seen.items()}

    def means(self) -> dict[str, float]:
        """Return the mean of each that is left."""
        return {name: mean(self.seen[name]) for name in self.left}

    def scores(self, chosen: str, *, at: float | None = None) -> dict[str, float]:
        """Return what each would score where `chosen` scores `at`; none: its mean.

        By what it differs from it on the batches that both have seen, so that those that were
        dropped early, on other batches than the rest, can be compared.
        """
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
    """Compare what `look` measures of each name on batches, for so many forward passes at most.

    Each is looked at on one batch at least whose measure is a number with one of them, if that is
    among the first eight: others tell nothing, and count only where there are none but them. Every
    eight batches, those are dropped that the best is ahead of by more than chance allows, and what
    they would have cost is left to the others.
    """
    seen = {name: list[float]() for name in names}
    nothing_learned = {name: list[float]() for name in names}
    left, stream, spent, learned = list(names), iter(batches), 0, False
    while len(left) > 1 or not learned:
        affordable = int((passes - spent) / len(left))
        # One more where none has told anything yet, but not for ever: a run may have diverged.
        owed = not learned and len(nothing_learned[names[0]]) < FEWEST_PAIRS
        chunk = list(islice(stream, min(FEWEST_PAIRS, max(affordable, int(owed)))))
        if not chunk:
            break
        looks = {name: look(name, chunk) for name in left}
        spent += len(chunk) * len(left)
        for values in zip(*looks.values(), strict=True):
            # Of one that is no number with any of them, all that is told is of the batch.
            target = seen if any(map(math.isfinite, values)) else nothing_learned
            for name, value in zip(looks, values, strict=True):
                target[name].append(value)
        learned = any(seen.values())
        if learned:
            left = _not_beaten({name: seen[name] for name in left}, better=better)
    if not spent:
        raise ConfigError(
            "read-outs were to be compared on batches, and there are none; give one or more, "
            "afresh for every call"
        )
    return Race(seen=seen if learned else nothing_learned, left=left, passes=spent)


def _not_beaten(seen: Mapping[str, Sequence[float]], *, better: Better) -> list[str]:
    """Return those that the best by the mean is not clearly ahead of; all if none is a number."""
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
    """Say whether differences are above zero beyond chance, one-sided; of too few, nothing is."""
    if len(differences) < FEWEST_PAIRS:
        return False
    error = stdev(differences) / math.sqrt(len(differences))
    return (
        mean(differences)
        > student_quantile(1 - RISK / rivals, freedom=len(differences) - 1) * error
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean, no number where one of them is none; `statistics` may refuse infinities."""
    return sum(values) / len(values)
