"""The numbers shown while a run goes on, as a value that each step hands on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from narrowcast.runs.records import StepRecord

KEPT = 0.9
"""Share of a smoothed number that is left one step later: it looks back about ten steps."""
WARM_UP = 3
"""First steps of a process, which say nothing of its pace: they compile, allocate and measure."""


@dataclass(frozen=True, kw_only=True)
class Smooth:
    """A mean over the last steps, in which older ones count less."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        """The mean; not a number before the first step."""
        return self.total / self.weight if self.weight else math.nan

    def after(self, x: float) -> "Smooth":
        """Return the mean with `x` in it; an infinite one would stay for good and is left out."""
        if not math.isfinite(x):
            return self
        return Smooth(total=self.total * KEPT + x, weight=self.weight * KEPT + 1)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How far a run is, and how it goes."""

    steps: int
    step: int = 0
    scale: float = 1.0
    skipped: int = 0
    items: int = 0
    seconds: float = 0.0
    last_loss: float = math.nan
    smooth_loss: Smooth = field(default_factory=Smooth)
    smooth_parts: Mapping[str, Smooth] = field(default_factory=dict)
    """Of each part of the loss, for tasks that name them."""
    warm: int = 0
    """Steps of this process so far, up to `WARM_UP`."""
    smooth_items: Smooth = field(default_factory=Smooth)
    smooth_seconds: Smooth = field(default_factory=Smooth)
    """Of the steps after the first `WARM_UP` of a process."""

    def resumed(self) -> "Tally":
        """Return the numbers for a process that goes on from here, at a pace of its own."""
        return replace(self, warm=0, smooth_items=Smooth(), smooth_seconds=Smooth())

    def after(self, record: StepRecord) -> "Tally":
        """Return the numbers with one more step in them."""
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
        """The loss of the last steps; that of the last one, where it is not finite."""
        return self.smooth_loss.value if math.isfinite(self.last_loss) else self.last_loss

    @property
    def step_seconds(self) -> float:
        """What one of the last steps took; before any counts, the mean of all."""
        known = self.smooth_seconds.weight or not self.step
        return self.smooth_seconds.value if known else self.seconds / self.step

    @property
    def items_per_second(self) -> float:
        """The pace of the last steps; before any counts, that of all."""
        if not self.smooth_seconds.weight:
            return self.items / self.seconds if self.seconds else math.nan
        seconds = self.smooth_seconds.value
        return self.smooth_items.value / seconds if seconds else math.nan

    @property
    def seconds_left(self) -> float:
        """The time the remaining steps take at that pace, evaluations not counted.

        Not a number until a step has been taken at that pace: the first would be ten times off.
        """
        return (self.steps - self.step) * self.smooth_seconds.value
