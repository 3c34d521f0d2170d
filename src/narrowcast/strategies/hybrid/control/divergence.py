"""The divergence monitor: is a run healthy, given the noise its batches have anyway?

A value folded over observations. What it is careful about: a loss that falls is no divergence; a
single batch three deviations off happens every 740 batches, so that the mean of about the last four
is judged, in units of one batch's noise; noise changes direction at two steps out of three, and
only what does so more often than chance allows oscillates.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

from narrowcast.strategies.hybrid.control.divergence_settings import DivergenceSettings
from narrowcast.strategies.hybrid.control.plain import restored, usable
from narrowcast.strategies.hybrid.control.recovery import Level

SignalName = Literal["finite", "loss", "gradient norm", "vanishing", "prediction", "oscillation"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one step shows."""

    loss: float
    gradient_norm: float | None = None
    """None where there was no backward pass."""
    predicted_loss: float | None = None
    """The loss that was predicted for this step; not its error."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One thing that was looked at, against what was expected of it."""

    name: SignalName
    value: float
    expected: float
    deviation: float
    """In the units of its thresholds: deviations, a multiple, or a relative error."""
    level: Level

    @property
    def triggered(self) -> bool:
        """Whether there is something to see."""
        return self.level > Level.NORMAL

    @property
    def escalates(self) -> bool:
        """Whether it counts among Warnings in a row.

        Turns are counted over a window, so that one sight of them is seen a hundred times; and what
        vanishes has often converged, where a rollback would undo good work.
        """
        return self.name not in ("oscillation", "vanishing")


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """How healthy a run is after one observation."""

    level: Level
    signals: tuple[Signal, ...]

    @property
    def summary(self) -> str:
        """What was seen, in a line."""
        seen = [each for each in self.signals if each.triggered]
        if not seen:
            return "normal"
        told = ", ".join(
            f"{each.name} {each.value:.4g} ({each.level.name.lower()})" for each in seen
        )
        return f"{self.level.name.lower()}: {told}"


@final
@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What has been seen of a run so far; part of what a checkpoint keeps."""

    observations: int = 0
    mean: float = 0.0
    """Of the loss, recent ones counting more."""
    lag: float = 0.0
    """How far the loss has been from its mean on average: a falling loss is below it."""
    variance: float = 0.0
    """Of the loss around its trend: the noise of a batch."""
    rise: float = 0.0
    """How far the last few losses were above the mean, on average."""
    norms: int = 0
    baseline_norm: float = 0.0
    """Mean of the first gradient norms."""
    losses: tuple[float, ...] = ()
    warnings: int = 0
    """Warnings in a row."""

    def noise(self, settings: DivergenceSettings) -> float:
        """Return the deviation of one batch's loss."""
        floor = max(settings.noise_floor * abs(self.mean), 1e-12)  # a loss of zero has some, too
        return max(math.sqrt(self.variance), floor)

    def rearmed(self) -> "Monitor":
        """Return a monitor that remembers the run but not its trouble, as after a rollback."""
        return replace(self, rise=0.0, losses=(), warnings=0)

    def to_json(self) -> dict[str, Any]:
        """Return the monitor as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Monitor":
        """Return the monitor that `to_json` told."""
        return restored(cls, data)


def observed(
    monitor: Monitor, observation: Observation, *, settings: DivergenceSettings
) -> tuple[Monitor, Assessment]:
    """Return the monitor after an observation, and how healthy the run is with it.

    What is not finite is judged and not remembered.
    """
    seen = (observation.loss, observation.gradient_norm, observation.predicted_loss)
    bad = [value for value in seen if value is not None and not usable(value)]
    if bad:
        signal = _signal("finite", bad[0], 0.0, deviation=math.inf, level=Level.CRITICAL)
        return monitor, Assessment(level=Level.CRITICAL, signals=(signal,))
    now = _with_norm(_with_loss(monitor, observation.loss, settings), observation, settings)
    signals = (
        *_loss_signal(monitor, now, settings),
        *_norm_signals(monitor, observation, settings),
        *_prediction_signal(observation, settings),
        *_oscillation_signal(now, settings),
    )
    level = max((each.level for each in signals), default=Level.NORMAL)
    escalates = any(each.escalates and each.level >= Level.WARNING for each in signals)
    warnings = monitor.warnings + 1 if escalates else 0
    if warnings >= settings.warnings_to_critical:
        level = Level.CRITICAL
    return replace(now, warnings=warnings), Assessment(level=level, signals=signals)


def _with_loss(monitor: Monitor, loss: float, settings: DivergenceSettings) -> Monitor:
    """Return the monitor with one more loss.

    What rises further than a warning counts as that far: a run that diverges must not raise the
    mean and the noise that it is judged by. A fall counts in full.
    """
    count = monitor.observations + 1
    weight = max(1 / count, 1 - settings.ema_decay)
    if count == 1:
        return replace(monitor, observations=1, mean=loss, losses=(loss,))
    deviation = loss - monitor.mean
    limit = settings.loss_sigma * monitor.noise(settings)
    known = count > settings.min_observations
    around_trend = deviation - monitor.lag
    # Four deviations: what is cut off nearer makes the noise of skewed losses too small.
    tail = max(4.0, settings.loss_sigma) * monitor.noise(settings)
    noise = max(-tail, min(tail, around_trend)) if known else around_trend
    step = min(limit, deviation) if known else deviation
    return replace(
        monitor,
        observations=count,
        mean=monitor.mean + weight * step,
        lag=monitor.lag + weight * (step - monitor.lag),
        variance=(1 - weight) * (monitor.variance + weight * noise**2),
        rise=settings.recent_decay * monitor.rise + (1 - settings.recent_decay) * deviation,
        losses=(*monitor.losses, loss)[-settings.max_history :],
    )


def _with_norm(monitor: Monitor, observation: Observation, settings: DivergenceSettings) -> Monitor:
    norm = observation.gradient_norm
    if norm is None or monitor.norms >= settings.baseline_observations:
        return monitor
    count = monitor.norms + 1
    baseline = monitor.baseline_norm + (norm - monitor.baseline_norm) / count
    return replace(monitor, norms=count, baseline_norm=baseline)


def _loss_signal(before: Monitor, now: Monitor, settings: DivergenceSettings) -> tuple[Signal, ...]:
    """Judge how far the last losses rose, by the mean and the noise from before them."""
    if before.observations < settings.min_observations:
        return ()
    deviation = now.rise / before.noise(settings)
    level = _level(
        deviation,
        caution=settings.caution_share * settings.loss_sigma,
        warning=settings.loss_sigma,
        critical=2 * settings.loss_sigma,
    )
    last = now.losses[-1]
    return (_signal("loss", last, before.mean, deviation=deviation, level=level),)


def _norm_signals(
    before: Monitor, observation: Observation, settings: DivergenceSettings
) -> tuple[Signal, ...]:
    norm, baseline = observation.gradient_norm, before.baseline_norm
    if norm is None or before.norms < settings.baseline_observations or baseline <= 0:
        return ()
    ratio = norm / baseline
    most = settings.gradient_norm_multiplier
    exploding = _level(ratio, warning=most, critical=10 * most)
    vanishing = Level.WARNING if ratio < settings.vanishing_gradient else Level.NORMAL
    return (
        _signal("gradient norm", norm, baseline, deviation=ratio, level=exploding),
        _signal("vanishing", norm, baseline, deviation=ratio, level=vanishing),
    )


def _prediction_signal(
    observation: Observation, settings: DivergenceSettings
) -> tuple[Signal, ...]:
    predicted = observation.predicted_loss
    if predicted is None:
        return ()
    error = abs(predicted - observation.loss) / max(abs(observation.loss), 1e-12)
    level = _level(error, caution=settings.prediction_caution, warning=settings.prediction_warning)
    return (_signal("prediction", observation.loss, predicted, deviation=error, level=level),)


def _oscillation_signal(now: Monitor, settings: DivergenceSettings) -> tuple[Signal, ...]:
    """Count turning points, against the mean and deviation they have in any white noise."""
    losses = now.losses
    count = len(losses)
    if count < 10:
        return ()
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    turns = sum((b - a) * (c - b) < 0 for a, b, c in triples)
    # Bienaymé 1874: of n points, 2(n - 2)/3 turn, with a variance of (16n - 29)/90.
    expected, deviation = 2 * (count - 2) / 3, math.sqrt((16 * count - 29) / 90)
    above = (turns - expected) / deviation
    level = _level(
        above, caution=settings.oscillation_caution, warning=settings.oscillation_warning
    )
    share = turns / (count - 2)
    return (_signal("oscillation", share, 2 / 3, deviation=above, level=level),)


def _level(
    value: float,
    *,
    warning: float,
    caution: float = math.inf,
    critical: float = math.inf,
) -> Level:
    if value > critical:
        return Level.CRITICAL
    if value > warning:
        return Level.WARNING
    return Level.CAUTION if value > caution else Level.NORMAL


def _signal(
    name: SignalName, value: float, expected: float, *, deviation: float, level: Level
) -> Signal:
    return Signal(name=name, value=value, expected=expected, deviation=deviation, level=level)
