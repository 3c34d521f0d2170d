"""How probable it is that a prediction will be accepted, learned from those that were.

A raw score says which predictions look better than others; what happened to predictions of such a
score says how probable acceptance is. With nothing seen, it is a half: unknown, and below every
threshold of the presets. Trials whose weights are thrown away teach as much as real ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, final

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.control.averages import MultiScaleAverage
from narrowcast.strategies.hybrid.control.plain import restored

BINS = 10
"""Classes of scores, and of probabilities in the table of what came of them."""


def raw_score(*, total: float, errors: Sequence[float], average: MultiScaleAverage) -> float:
    """Return how good a prediction looks: agreement, earlier errors, and how calm the loss is.

    `total` is the forecast's doubt, `errors` the relative errors of predicted losses so far. It is
    no probability: 0.88 before anything was predicted, if members agree.
    """
    recent = errors[-50:]
    history = 0.7
    if len(recent) >= 10:
        mean = math.fsum(abs(error) for error in recent) / len(recent)
        history = min(1 / (1 + mean), 0.99)
    stability = max(1 / (1 + 2 * average.instability), 0.5)
    return 0.4 / (1 + total) + 0.4 * history + 0.2 * stability


class Estimate(NamedTuple):
    """A probability of acceptance, and how much it rests on."""

    probability: float
    deviation: float
    """Of the probability itself: 0.29 where nothing is known."""
    trials: float
    """Trials of such a score that are remembered."""


class ReliabilityRow(NamedTuple):
    """What came of predictions that were given about the same probability."""

    low: float
    high: float
    predicted: float
    observed: float
    trials: int


@final
@dataclass(frozen=True, kw_only=True)
class Calibration:
    """From scores to probabilities; part of what a checkpoint keeps.

    Each class of scores has a beta distribution whose prior is the acceptance of all classes.
    """

    memory: float = 200.0
    """Trials after which an old one counts for a third: what is accepted early is not later."""
    prior_trials: float = 4.0
    """How many trials the acceptance of all classes counts for in one of them."""
    accepted: tuple[float, ...] = (0.0,) * BINS
    tried: tuple[float, ...] = (0.0,) * BINS
    said_sum: tuple[float, ...] = (0.0,) * BINS
    """Probabilities that were given before trials, by class of probability."""
    said_accepted: tuple[int, ...] = (0,) * BINS
    said_count: tuple[int, ...] = (0,) * BINS
    squared_error: float = 0.0

    def __post_init__(self) -> None:
        if not (self.memory >= 1 and self.prior_trials > 0):
            raise RecipeError(
                f"memory={self.memory:g} and prior_trials={self.prior_trials:g} would forget every "
                "trial; write at least 1, and more than 0"
            )

    def estimate(self, score: float) -> Estimate:
        """Return how probable acceptance is for a prediction of this score."""
        index = _bin(score)
        whole = (math.fsum(self.accepted) + 1) / (math.fsum(self.tried) + 2)
        # Before anything is known the prior is flat: two trials, not four.
        strength = min(self.prior_trials, math.fsum(self.tried) + 2)
        good = self.accepted[index] + strength * whole
        trials = self.tried[index] + strength
        mean = good / trials
        return Estimate(mean, math.sqrt(mean * (1 - mean) / (trials + 1)), self.tried[index])

    def needs_trial(self, score: float, *, threshold: float, least: float = 3.0) -> bool:
        """Say whether a trial of this score could show that it is surer than the threshold.

        Below the threshold nothing is predicted and so nothing learned; a trial whose weights are
        thrown away costs its forwards and ends that. Where it is sure already, none is needed.
        """
        known = self.estimate(score)
        if known.probability >= threshold:
            return False
        return known.trials < least or known.probability + known.deviation >= threshold

    def faded(self) -> "Calibration":
        """Return the calibration with one trial's forgetting and no trial, as after a hold.

        What has not been tried for long is unknown again.
        """
        keep = 1 - 1 / self.memory
        return replace(
            self,
            accepted=tuple(keep * each for each in self.accepted),
            tried=tuple(keep * each for each in self.tried),
        )

    def after(self, score: float, *, accepted: bool) -> "Calibration":
        """Return the calibration after a trial, whose probability is judged as it was before."""
        said = self.estimate(score).probability
        index, place = _bin(score), _bin(said)
        faded = self.faded()
        return replace(
            self,
            accepted=_added(faded.accepted, index, float(accepted)),
            tried=_added(faded.tried, index, 1.0),
            said_sum=_added(self.said_sum, place, said),
            said_accepted=_added(self.said_accepted, place, int(accepted)),
            said_count=_added(self.said_count, place, 1),
            squared_error=self.squared_error + (said - float(accepted)) ** 2,
        )

    @property
    def trials(self) -> int:
        """All trials there were."""
        return sum(self.said_count)

    @property
    def brier(self) -> float | None:
        """The mean squared error of what was said; a half said of everything has 0.25."""
        return self.squared_error / self.trials if self.trials else None

    @property
    def expected_error(self) -> float | None:
        """The expected calibration error: how far off what was said is, on average."""
        if not self.trials:
            return None
        rows = self.table()
        return math.fsum(r.trials * abs(r.predicted - r.observed) for r in rows) / self.trials

    def table(self) -> tuple[ReliabilityRow, ...]:
        """Return what was said against what came of it, a row a class that has trials."""
        return tuple(
            ReliabilityRow(i / BINS, (i + 1) / BINS, total / count, good / count, count)
            for i, (total, good, count) in enumerate(
                zip(self.said_sum, self.said_accepted, self.said_count, strict=True)
            )
            if count
        )

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Calibration":
        """Return the calibration that `to_json` told."""
        return restored(cls, data)


def _bin(share: float) -> int:
    """Return the class of a number from 0 to 1; what is outside is in the last one on its side."""
    if math.isnan(share):
        return 0
    return min(int(min(max(share, 0.0), 1.0) * BINS), BINS - 1)


def _added(values: Sequence[Any], index: int, more: Any) -> tuple[Any, ...]:
    return (*values[:index], values[index] + more, *values[index + 1 :])
