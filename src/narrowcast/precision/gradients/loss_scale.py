"""The loss scale: a power of two that lifts gradients into the range of a narrow format.

The settings are a frozen value; the running scale is three small tensors on the device, so that no
step waits to learn whether it overflowed. It is clamped at both ends and so never reaches zero,
where one good batch would divide by it and write NaN into every weight.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import RecipeError

# Powers of two that are normal fp32 numbers, as their inverses are.
SMALLEST_POWER, LARGEST_POWER = 2.0**-126, 2.0**126


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the scale begins and moves."""

    initial: float = 2.0**16
    """The scale of the first step, rounded down to a power of two, as are the bounds."""
    growth: float = 2.0
    """The factor after `growth_interval` calm steps."""
    backoff: float = 0.5
    """The factor after an overflow."""
    growth_interval: int = 2000
    """Calm steps before the scale grows."""
    min: float = 1.0
    """Overflows that go on here are told, and after some time training is given up."""
    max: float = 2.0**18
    """The scale grows no further."""
    hysteresis: int = 1
    """Overflows in a row before the scale backs off."""
    dynamic: bool = True
    """False: the scale stays as it begins."""

    def __str__(self) -> str:
        """Say how it moves."""
        if not self.dynamic:
            return f"{self.initial:g}, static"
        strikes = "an overflow" if self.hysteresis == 1 else f"{self.hysteresis} overflows in a row"
        return (
            f"{self.initial:g} at first, from {self.min:g} to {self.max:g}; times {self.growth:g} "
            f"after {self.growth_interval} calm steps, times {self.backoff:g} after {strikes}"
        )

    def __post_init__(self) -> None:
        for name in ("growth", "backoff"):
            value = getattr(self, name)
            if power_of_two_below(value) != value:
                raise RecipeError(
                    f"loss_scale.{name}={value:g}: only powers of two scale exactly; "
                    f"write {power_of_two_below(value):g}"
                )
        if not (self.growth > 1 > self.backoff > 0):
            raise RecipeError(
                f"loss_scale.growth={self.growth:g} and backoff={self.backoff:g}: growth must be "
                "above 1 and backoff between 0 and 1; write growth=2 and backoff=0.5"
            )
        for name in ("initial", "min", "max"):
            # Rounded down, so that `max` holds whatever was asked.
            object.__setattr__(self, name, power_of_two_below(getattr(self, name)))
            if not SMALLEST_POWER <= getattr(self, name) <= LARGEST_POWER:
                raise RecipeError(
                    f"loss_scale.{name}={getattr(self, name):g}: fp32 must hold it and its "
                    f"inverse; write a value from {SMALLEST_POWER:g} to {LARGEST_POWER:g}"
                )
        if not self.min <= self.initial <= self.max:
            raise RecipeError(
                f"loss_scale.initial={self.initial:g} lies outside min={self.min:g} … "
                f"max={self.max:g}; write all three so that min ≤ initial ≤ max"
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise RecipeError(
                "loss_scale.growth_interval and hysteresis count steps; write 1 or more"
            )


def power_of_two_below(value: float) -> float:
    """Return the largest power of two that is at most `value`."""
    if not (value > 0 and math.isfinite(value)):
        raise RecipeError(f"a loss scale of {value} is none; write a positive number")
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


class RunningScale:
    """A loss scale in use: its value and its memory, on the device."""

    def __init__(self, settings: LossScale, device: torch.device) -> None:
        self.settings = settings
        self.value = torch.full((), settings.initial, dtype=torch.float32, device=device)
        self._calm = torch.zeros((), dtype=torch.int32, device=device)
        self._strikes = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def can_give_way(self) -> Tensor:
        """Whether an overflow would still move the scale, now or after more of them."""
        lowest = self.settings.min if self.settings.dynamic else self.settings.initial
        return self.value > lowest

    def update(self, finite: Tensor) -> None:
        """Move the scale after a step whose gradients were finite, or not. Does not wait."""
        if not self.settings.dynamic:
            return
        s = self.settings
        # In place: a captured step reads and writes the same memory whenever it is replayed.
        self._strikes.copy_(torch.where(finite, 0, self._strikes + 1))
        calm = torch.where(finite, self._calm + 1, 0)
        back_off = self._strikes >= s.hysteresis
        grow = calm >= s.growth_interval
        moved = torch.where(back_off, self.value * s.backoff, self.value)
        moved = torch.where(grow, moved * s.growth, moved)
        self.value.copy_(moved.clamp(s.min, s.max))
        self._calm.copy_(torch.where(grow, 0, calm))

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its memory."""
        return {
            "value": self.value.clone(),
            "calm": self._calm.clone(),
            "strikes": self._strikes.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a saved scale stood."""
        self.value.copy_(state["value"])
        self._calm.copy_(state["calm"])
        self._strikes.copy_(state["strikes"])
