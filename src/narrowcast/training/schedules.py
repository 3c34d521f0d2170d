"""Learning rate schedules: a factor on `optimizer.lr` for every step."""

import math
from collections.abc import Callable, Sequence

from narrowcast.config.common_sections import LrScheduleSection


def lr_factors(
    settings: LrScheduleSection,
    steps: int,
    *,
    frozen_until: Sequence[float],
    stretch: float = 1.0,
) -> list[Callable[[int], float]]:
    """Return the factor of each parameter group, 0 while the group is frozen.

    With a learning rate of 0, AdamW neither moves nor decays a weight.
    """
    factor = lr_factor(settings, steps, stretch=stretch)

    def after(share: float) -> Callable[[int], float]:
        begins = math.ceil(share * steps)
        return lambda updates: 0.0 if updates < begins else factor(updates)

    return [after(share) if share else factor for share in frozen_until]


def lr_factor(
    settings: LrScheduleSection, steps: int, *, stretch: float = 1.0
) -> Callable[[int], float]:
    """Return the factor on the learning rate as a function of the updates so far, for `LambdaLR`.

    A linear warm-up, then the shape of `settings.name`, which falls to `settings.min_lr_ratio`
    after `stretch` times `steps` updates.
    """

    warmup = settings.warmup_steps(steps)

    def factor(updates: int) -> float:
        if updates < warmup:
            return (updates + 1) / warmup
        length = max(round(steps * stretch) - warmup, 1)
        progress = min((updates - warmup) / length, 1.0)
        match settings.name:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - (1.0 - settings.min_lr_ratio) * progress
            case "cosine":
                fall = (1.0 + math.cos(math.pi * progress)) / 2
                return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * fall

    return factor
