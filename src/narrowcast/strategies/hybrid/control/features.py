"""What a run looks like at a step: 64 numbers from a rolling window, none of them left empty."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.precision.plan.phases import PHASES
from narrowcast.strategies.hybrid.control.averages import MultiScaleAverage
from narrowcast.strategies.hybrid.control.optimizer_facts import OptimizerFacts
from narrowcast.strategies.hybrid.control.phases import PhaseState
from narrowcast.strategies.hybrid.control.plain import restored, usable

LOSSES, NORMS, ERRORS, JUMPS = 256, 64, 50, 50
"""How many of each a window keeps."""

_STATISTICS = ("mean", "std", "min", "max")
NAMES: tuple[str, ...] = (
    *("loss", *(f"loss {name}" for name in _STATISTICS), "loss trend", "loss ratio", "step"),
    *("norm", *(f"norm {name}" for name in _STATISTICS), "norm log10", "norm ratio", "norm noise"),
    *("momentum mean", "momentum std", "variance mean", "variance std"),
    *("log10 effective lr", "beta1 to the step", "beta2 to the step", "log10 lr"),
    *("phase", "phase step"),
    *(f"in {phase}" for phase in PHASES),
    *(
        f"{what} {span}"
        for what in ("loss", "norm")
        for span in ("fast", "medium", "slow", "spread")
    ),
    *(f"{what} {age} ago" for what in ("loss", "norm") for age in range(8)),
    *("loss slope", "loss autocorrelation", "loss turns", "loss median", "loss curvature"),
    *("norm trend", "prediction error", "accepted share", "predictions in a row", "confidence"),
)
"""What each of the 64 numbers is."""
LOSS = NAMES.index("loss")
LOSS_AVERAGES = tuple(NAMES.index(f"loss {span}") for span in ("fast", "medium", "slow"))


@final
@dataclass(frozen=True, kw_only=True)
class FeatureWindow:
    """The recent past of a run; part of what a checkpoint keeps."""

    step: int = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    loss_average: MultiScaleAverage = field(default_factory=MultiScaleAverage)
    norm_average: MultiScaleAverage = field(default_factory=MultiScaleAverage)
    errors: tuple[float, ...] = ()
    """Relative errors of predicted losses."""
    jumps: tuple[bool, ...] = ()
    """Whether predictions were accepted."""

    def after(self, loss: float, gradient_norm: float | None = None) -> "FeatureWindow":
        """Return the window after a step; a step whose numbers are not finite only counts."""
        now = replace(self, step=self.step + 1)
        if usable(loss):
            losses = (*self.losses, loss)[-LOSSES:]
            now = replace(now, losses=losses, loss_average=self.loss_average.after(loss))
        if gradient_norm is not None and usable(gradient_norm):
            norms = (*self.norms, gradient_norm)[-NORMS:]
            now = replace(now, norms=norms, norm_average=self.norm_average.after(gradient_norm))
        return now

    def after_prediction(self, *, predicted: float, actual: float) -> "FeatureWindow":
        """Return the window after the loss that was predicted is known."""
        if not (usable(predicted) and usable(actual)):
            return self
        error = abs(predicted - actual) / max(abs(actual), 1e-12)
        return replace(self, errors=(*self.errors, error)[-ERRORS:])

    def after_jump(self, *, accepted: bool) -> "FeatureWindow":
        """Return the window after a prediction was verified."""
        return replace(self, jumps=(*self.jumps, accepted)[-JUMPS:])

    def to_json(self) -> dict[str, Any]:
        """Return the window as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "FeatureWindow":
        """Return the window that `to_json` told."""
        averages = {
            name: restored(MultiScaleAverage, data[name])
            for name in ("loss_average", "norm_average")
        }
        return restored(cls, {**data, **averages})


def features(
    window: FeatureWindow, state: PhaseState, *, optimizer: OptimizerFacts, confidence: float
) -> Tensor:
    """Return the 64 numbers of a step, in fp32 on the CPU; `NAMES` says which is which.

    All are finite. Before the first loss, what is made of losses is zero.
    """
    values = [
        *_loss_features(window),
        *_norm_features(window),
        *_optimizer_features(optimizer, window.step),
        PHASES.index(state.phase),
        state.phase_step / 100,
        *(float(state.phase == phase) for phase in PHASES),
        *_average_features(window.loss_average),
        *_average_features(window.norm_average),
        *_recent(window.losses),
        *_recent(window.norms),
        *_shape_features(window.losses),
        _trend(window.norms),
        _mean(window.errors),
        _mean(window.jumps),
        state.consecutive / 5,
        confidence,
    ]
    largest = torch.finfo(torch.float32).max
    made = torch.tensor(values, dtype=torch.float64, device="cpu")
    return made.clamp(-largest, largest).float()


def _loss_features(window: FeatureWindow) -> tuple[float, ...]:
    losses = window.losses
    last = losses[-1] if losses else 0.0
    mean = _mean(losses)
    ratio = last / mean if mean else 1.0
    return (last, *_summary(losses), _trend(losses), ratio, window.step / 1e4)


def _norm_features(window: FeatureWindow) -> tuple[float, ...]:
    norms = window.norms
    last, mean = (norms[-1] if norms else 0.0), _mean(norms)
    ratio, noise = (last / mean, _std(norms) / mean) if mean else (1.0, 0.0)
    return (last, *_summary(norms), _log10(last), min(ratio, 10.0), noise)


def _optimizer_features(facts: OptimizerFacts, step: int) -> tuple[float, ...]:
    return (
        facts.momentum_mean,
        facts.momentum_std,
        facts.variance_mean,
        facts.variance_std,
        _log10(facts.effective_lr),
        facts.beta1**step,
        facts.beta2**step,
        _log10(facts.lr),
    )


def _average_features(average: MultiScaleAverage) -> tuple[float, ...]:
    return (average.fast, average.medium, average.slow, average.spread)


def _shape_features(losses: Sequence[float]) -> tuple[float, ...]:
    """Return slope, autocorrelation, turns, median and curvature of the last 64."""
    recent = losses[-64:]
    if len(recent) < 3:
        return (0.0, 0.0, 0.0, recent[-1] if recent else 0.0, 0.0)
    mean = _mean(recent)
    centred = [loss - mean for loss in recent]
    square = math.fsum(value * value for value in centred)
    middle = (len(recent) - 1) / 2
    slope = math.fsum((i - middle) * value for i, value in enumerate(centred)) / math.fsum(
        (i - middle) ** 2 for i in range(len(recent))
    )
    neighbours = math.fsum(a * b for a, b in pairwise(centred))
    correlation = neighbours / square if square else 0.0
    triples = zip(recent, recent[1:], recent[2:], strict=False)
    turns = sum((b - a) * (c - b) < 0 for a, b, c in triples) / (len(recent) - 2)
    curvature = _trend(losses) - _trend(losses[:-16])
    return (slope, correlation, turns, statistics.median(recent), curvature)


def _recent(values: Sequence[float]) -> list[float]:
    """Return the last eight, newest first, in deviations from their window's mean."""
    mean, std = _mean(values), _std(values)
    scaled = [(value - mean) / std if std else 0.0 for value in reversed(values[-8:])]
    return scaled + [0.0] * (8 - len(scaled))


def _summary(values: Sequence[float]) -> tuple[float, ...]:
    if not values:
        return (0.0, 0.0, 0.0, 0.0)
    return (_mean(values), _std(values), min(values), max(values))


def _trend(values: Sequence[float]) -> float:
    """Return how much the mean of the last 16 is above that of the 16 before."""
    if len(values) < 17:
        return 0.0
    return _mean(values[-16:]) - _mean(values[-32:-16])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-10))
