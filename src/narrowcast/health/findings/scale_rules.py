"""What can be seen to go wrong with a loss scale: one rule a function."""

from collections.abc import Iterator, Sequence

from narrowcast.health.findings.rules import TensorHistory, Trouble, percent
from narrowcast.numerics import FP16
from narrowcast.precision.gradients.loss_scale import LossScale, power_of_two_below
from narrowcast.precision.plan.roles import GRADIENTS
from narrowcast.precision.plan.wording import Wording

LOW = 0.5
"""Share of a gradient below the smallest number with all its digits that a larger scale is for."""
SPARE = 16.0
"""A suggested scale leaves so much above the largest gradient seen: samples miss the rarest."""


def floor(scale: float, settings: LossScale, terms: Wording) -> Iterator[Trouble]:
    """A scale that overflows have brought down to its smallest value."""
    if settings.dynamic and scale <= settings.min_scale < settings.init_scale:
        yield Trouble(
            "floor",
            "",
            "loss scale",
            "loss scale at its floor",
            f"overflows have lowered it from {settings.init_scale:g} to {scale:g}, its minimum",
            "try bf16 for the modules that the skipped steps name"
            f"{' (precision.overrides)' if terms.in_recipe else ''}, or a smaller "
            f"{terms.loss_scale('min_scale')}",
        )


def low(
    seen: Sequence[TensorHistory], scale: float, settings: LossScale, names: Wording
) -> Iterator[Trouble]:
    """Gradients lost at the lower end of fp16, while at its upper end there is room.

    What became zero on the way cannot be seen any more; what is about to, has lost digits.
    """
    gradients = [each for each in seen if each.format == FP16.name and each.role in GRADIENTS]
    largest = max((each.amax for each in gradients), default=0.0)
    if not 0 < largest < FP16.largest:
        return
    worst = max(gradients, key=_below)
    possible = power_of_two_below(min(settings.max_scale, scale * FP16.largest / (SPARE * largest)))
    if _below(worst) > LOW and possible > scale:
        initial = names.loss_scale("init_scale", f"{possible:g}")
        setting = names.loss_scale("growth_interval")
        interval = f" or a {setting} below {settings.growth_interval}"
        yield Trouble(
            "low",
            "",
            "loss scale",
            "loss scale too low",
            f"{percent(_below(worst))} of {worst.module} {worst.role} lies below "
            f"{FP16.smallest_normal:.2g}, where fp16 loses precision and then flushes to zero; "
            f"the scale is {scale:g}",
            f"try {initial}{interval if settings.dynamic else ''}",
        )


def _below(seen: TensorHistory) -> float:
    return seen.underflow + seen.subnormal
