"""The learning rate over a run: a factor of `optimizer.lr` for every step."""

import math
from collections.abc import Callable

from narrowcast.config.common_sections import LrScheduleSection


def lr_factor(settings: LrScheduleSection, steps: int) -> Callable[[int], float]:
    """Return the factor on the learning rate by the number of updates made so far.

    A linear warm-up of `settings.warmup` steps, the last of them at the full rate; then the shape
    of `settings.name`, which comes down to `settings.final` once `steps` updates are made. It fits
    `torch.optim.lr_scheduler.LambdaLR`.
    """

    def factor(updates: int) -> float:
        if updates < settings.warmup:
            return (updates + 1) / settings.warmup
        length = max(steps - settings.warmup, 1)
        progress = min((updates - settings.warmup) / length, 1.0)
        match settings.name:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - (1.0 - settings.final) * progress
            case "cosine":
                fall = (1.0 + math.cos(math.pi * progress)) / 2
                return settings.final + (1.0 - settings.final) * fall

    return factor
