"""The numbers shown during a run, as an immutable value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from narrowcast.runs.records import StepRecord

KEPT = 0.9
"""Decay of a smoothed number per step: about ten steps count."""
WARM_UP = 3
"""First steps of a process, which are slow: they compile, allocate and measure."""


@dataclass(frozen=True, kw_only=True)
class Smooth:
    """Exponential moving average."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        """The mean; NaN before the first step."""
        return self.total / self.weight if self.weight else math.nan

    def after(self, x: float) -> "Smooth":
        """Return the mean with `x`; nonfinite values are left out."""
        if not math.isfinite(x):
            return self
        return Smooth(total=self.total * KEPT + x, weight=self.weight * KEPT + 1)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Progress and speed of a run."""

    steps: int
    step: int = 0
    scale: float = 1.0
    skipped: int = 0
    items: int = 0
    seconds: float = 0.0
    last_loss: float = math.nan
    smooth_loss: Smooth = field(default_factory=Smooth)
    smooth_parts: Mapping[str, Smooth] = field(default_factory=dict)
    """Of each loss part."""
    warm: int = 0
    """Steps of this process so far, up to `WARM_UP`."""
    smooth_items: Smooth = field(default_factory=Smooth)
    smooth_seconds: Smooth = field(default_factory=Smooth)
    """Of the steps after the first `WARM_UP` of a process."""

    def resumed(self) -> "Tally":
        """Return the numbers for a process that resumes here, with a speed of its own."""
        return replace(self, warm=0, smooth_items=Smooth(), smooth_seconds=Smooth())

    def after(self, record: StepRecord) -> "Tally":
        """Return the numbers after one more step."""
        settled = self.warm >= WARM_UP
        return replace(
            self,
            step=record.step,
            scale=record.loss_scale,
            skipped=self.skipped + (not record.applied),
            items=self.items + record.items,
            seconds=self.seconds + record.seconds,
            last_loss=record.loss,
            smooth_loss=self.smooth_loss.after(record.loss),
            smooth_parts={
                **self.smooth_parts,
                **{
                    n: self.smooth_parts.get(n, Smooth()).after(x)
                    for n, x in record.loss_parts.items()
                },
            },
            warm=min(self.warm + 1, WARM_UP),
            smooth_items=self.smooth_items.after(record.items if settled else math.nan),
            smooth_seconds=self.smooth_seconds.after(record.seconds if settled else math.nan),
        )

    @property
    def loss(self) -> float:
        """Smoothed loss; the last one if it is not finite."""
        return self.smooth_loss.value if math.isfinite(self.last_loss) else self.last_loss

    @property
    def step_seconds(self) -> float:
        """Smoothed time per step; at first the mean of all."""
        known = self.smooth_seconds.weight or not self.step
        return self.smooth_seconds.value if known else self.seconds / self.step

    @property
    def items_per_second(self) -> float:
        """Smoothed items per second; at first the mean of all steps."""
        if not self.smooth_seconds.weight:
            return self.items / self.seconds if self.seconds else math.nan
        seconds = self.smooth_seconds.value
        return self.smooth_items.value / seconds if seconds else math.nan

    @property
    def seconds_left(self) -> float:
        """Time for the remaining steps without evaluations; NaN during the slow first steps."""
        return (self.steps - self.step) * self.smooth_seconds.value
