"""Divergence of a run, judged by the noise of its batches.

A single batch three deviations off happens once in 740 batches, so the mean of about the last four
losses is compared with the mean of the last hundred.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import final

DECAY = 0.99
"""Of the mean and variance of the loss."""
RECENT_DECAY = 0.75
"""Of the recent rise: about four batches."""
FEWEST_LOSSES = 20
"""Losses before any is judged."""
FEWEST_NORMS = 50
"""Gradient norms whose mean later ones are compared with."""
LARGEST_NORM = 100.0
"""A gradient norm that is a divergence, as a multiple of the first ones."""
TAIL = 4.0
"""Deviations beyond which a loss adds no more to the variance: a spike must not hide others."""
NOISE_FLOOR = 1e-3
"""The smallest deviation of a batch, as a share of the mean loss."""


@final
@dataclass(frozen=True, kw_only=True)
class DivergenceMonitor:
    """Running statistics of a run's loss and gradient norm."""

    sigma: float
    """A rise of the loss that is a divergence, in deviations of one batch."""
    losses: int = 0
    mean: float = 0.0
    lag: float = 0.0
    """Mean distance of the loss from its mean: a falling loss is below it."""
    variance: float = 0.0
    rise: float = 0.0
    """Mean distance of the last few losses from the mean."""
    norms: int = 0
    first_norm: float = 0.0
    problem: str = ""
    """What the worst observation was since `cleared()`; empty if there was no divergence."""

    @property
    def noise(self) -> float:
        """Standard deviation of one batch's loss."""
        return max(math.sqrt(self.variance), NOISE_FLOOR * abs(self.mean), 1e-12)

    def after(self, loss: float, grad_norm: float | None = None) -> "DivergenceMonitor":
        """Return the monitor after one applied step; nonfinite numbers change no statistics."""
        for value in (loss, grad_norm):
            if value is not None and not abs(value) < 1e100:  # its square must be finite
                return replace(self, problem=self.problem or f"a value of {value} in a step")
        monitor = self._after_loss(loss)
        if grad_norm is not None:
            monitor = monitor._after_norm(grad_norm)
        return monitor

    def cleared(self) -> "DivergenceMonitor":
        """Return the monitor with the same statistics and no divergence."""
        return replace(self, rise=0.0, problem="")

    def to_json(self) -> dict[str, float | str]:
        return asdict(self)

    def _after_loss(self, loss: float) -> "DivergenceMonitor":
        count = self.losses + 1
        if count == 1:
            return replace(self, losses=1, mean=loss)
        weight = max(1 / count, 1 - DECAY)
        deviation = loss - self.mean
        step, around_trend, rise = deviation, deviation - self.lag, self.rise
        rise += (1 - RECENT_DECAY) * (deviation - rise)
        problem = self.problem
        if self.losses >= FEWEST_LOSSES:
            # A run that diverges must not raise the mean and the noise that it is judged by.
            step = min(deviation, self.sigma * self.noise)
            tail = max(TAIL, self.sigma) * self.noise
            around_trend = max(-tail, min(tail, around_trend))
            if rise > self.sigma * self.noise:
                deviations = rise / self.noise
                problem = problem or f"the loss rose by {deviations:.1f} standard deviations"
        return replace(
            self,
            losses=count,
            mean=self.mean + weight * step,
            lag=self.lag + weight * (step - self.lag),
            variance=(1 - weight) * (self.variance + weight * around_trend**2),
            rise=rise,
            problem=problem,
        )

    def _after_norm(self, norm: float) -> "DivergenceMonitor":
        if self.norms < FEWEST_NORMS:
            count = self.norms + 1
            mean = self.first_norm + (norm - self.first_norm) / count
            return replace(self, norms=count, first_norm=mean)
        if 0 < LARGEST_NORM * self.first_norm < norm:
            times = norm / self.first_norm
            problem = self.problem or f"the gradient norm is {times:.3g} times that of the start"
            return replace(self, problem=problem)
        return self
