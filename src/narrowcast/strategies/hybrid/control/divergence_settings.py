"""How much of each signal of divergence is too much."""

import math
from dataclasses import asdict, dataclass

from narrowcast.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class DivergenceSettings:
    """How much of each signal is too much."""

    loss_sigma: float = 3.0
    """A rise of the loss that warns, in deviations of one batch; twice as much is critical."""
    caution_share: float = 0.7
    """The share of it that asks for caution."""
    gradient_norm_multiplier: float = 100.0
    """A norm that warns, as a multiple of the first ones; ten times as much is critical."""
    vanishing_gradient: float = 0.01
    """A norm that warns for being small, as a multiple of the first ones."""
    prediction_caution: float = 0.2
    """A relative error of a predicted loss that asks for caution."""
    prediction_warning: float = 0.5
    """One that warns."""
    oscillation_caution: float = 3.0
    """Turns of the loss that ask for caution, in deviations above what noise has."""
    oscillation_warning: float = 5.0
    """Turns that warn."""
    ema_decay: float = 0.99
    """How slowly means are forgotten."""
    recent_decay: float = 0.75
    """How slowly the recent rise is forgotten: four batches."""
    baseline_observations: int = 50
    """Gradient norms that make the baseline."""
    min_observations: int = 20
    """Losses before any is judged: their noise has to be known."""
    max_history: int = 100
    """Losses among which turns are counted."""
    noise_floor: float = 1e-3
    """The least noise that is believed in, as a share of the mean loss."""
    warnings_to_critical: int = 3
    """Warnings in a row that are as bad as a critical one."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise RecipeError(
                    f"divergence.{name}={value:g} would see everything or nothing; "
                    "write a positive number"
                )
        for name in ("ema_decay", "recent_decay", "caution_share"):
            if getattr(self, name) >= 1:
                raise RecipeError(f"divergence.{name} has to be below 1; write a share such as 0.7")
