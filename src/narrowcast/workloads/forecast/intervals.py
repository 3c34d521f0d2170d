"""Prediction intervals around point forecasts: split conformal prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.errors import ConfigError


def conformal_radius(residuals: Tensor, levels: Sequence[float]) -> Tensor:
    """Return how far intervals reach from a point forecast, per level, channel and step.

    The radius is the k-th smallest absolute residual with k = ceil((n + 1) level). If calibration
    and forecast windows are exchangeable, an interval holds the actual value with a probability of
    at least `level`, and at most `level` + 1 / (n + 1) (Vovk et al. 2005, Lei et al. 2018).
    Windows of one series are not quite exchangeable, so measure the coverage on a test set too.

    Args:
        residuals: actual values less forecasts of windows that were not trained on, (windows,
            channels, horizon). NaN where the actual value is missing.
        levels: probabilities, such as 0.8 and 0.95.

    Returns:
        (levels, channels, horizon), in the units of the residuals.

    Raises:
        ConfigError: a level needs more windows. 0.95 needs 19, 0.8 needs 4.
    """
    if residuals.ndim != 3:
        raise ConfigError(
            "residuals must have the shape (windows, channels, horizon), got "
            f"{tuple(residuals.shape)}."
        )
    if not len(levels) or not all(0 < level < 1 for level in levels):
        raise ConfigError(f"levels must be between 0 and 1, got {list(levels)}. Write 0.8 or such.")
    distances = residuals.detach().abs().double()
    counts = distances.isfinite().sum(0)
    least = int(counts.min()) if counts.numel() else 0
    ordered = distances.nan_to_num(nan=torch.inf).sort(0).values
    radii = []
    for level in levels:
        # (n + 1) level may be an integer that rounding has put a little above itself.
        if math.ceil((least + 1) * level - 1e-9) > least:
            needed = math.ceil(level / (1 - level) - 1e-9)
            raise ConfigError(
                f"An interval of {level:g} needs {needed:,} calibration windows with a value at "
                f"every step, got {least:,}. Use more validation rows, or a lower level."
            )
        ranks = ((counts + 1) * level - 1e-9).ceil().long()
        radii.append(ordered.gather(0, ranks[None] - 1)[0])
    return torch.stack(radii).to(residuals.dtype)
