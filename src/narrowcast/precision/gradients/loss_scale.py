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

from narrowcast.errors import ConfigError

# Powers of two that are normal fp32 numbers, as their inverses are.
SMALLEST_POWER, LARGEST_POWER = 2.0**-126, 2.0**126


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Settings of the dynamic loss scale, named as in `torch.amp.GradScaler`.

    Example:
        >>> nc.prepare(model, optimizer, policy="fp16", loss_scale=nc.LossScale(init_scale=1024))
    """

    init_scale: float = 2.0**16
    """Scale of the first step, rounded down to a power of two, as are the bounds."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` finite steps in a row: a power of two above 1."""
    backoff_factor: float = 0.5
    """Factor after an overflow: a power of two below 1."""
    growth_interval: int = 2000
    """Finite steps in a row before the scale grows."""
    min_scale: float = 1.0
    """The scale shrinks no further. Overflows here are reported, and in the end training stops."""
    max_scale: float = 2.0**18
    """The scale grows no further."""
    hysteresis: int = 1
    """Overflows in a row before the scale shrinks."""
    dynamic: bool = True
    """False: the scale stays at `init_scale`."""

    def __str__(self) -> str:
        """Say how it moves."""
        if not self.dynamic:
            return f"{self.init_scale:g}, static"
        strikes = "an overflow" if self.hysteresis == 1 else f"{self.hysteresis} overflows in a row"
        return (
            f"{self.init_scale:g} at first, from {self.min_scale:g} to {self.max_scale:g}; times "
            f"{self.growth_factor:g} after {self.growth_interval} finite steps, times "
            f"{self.backoff_factor:g} after {strikes}"
        )

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"loss_scale.{name} must be a number, got {value!r}.")
        _check_factor("growth_factor", self.growth_factor, ends="above 1", least=2)
        _check_factor("backoff_factor", self.backoff_factor, ends="below 1", most=0.5)
        for name in ("init_scale", "min_scale", "max_scale"):
            # Rounded down, so that `max_scale` holds whatever was requested.
            object.__setattr__(self, name, power_of_two_below(getattr(self, name)))
            if not SMALLEST_POWER <= getattr(self, name) <= LARGEST_POWER:
                raise ConfigError(
                    f"loss_scale.{name} must be between {SMALLEST_POWER:g} and {LARGEST_POWER:g}, "
                    f"so that fp32 holds it and its inverse, got {getattr(self, name):g}."
                )
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ConfigError(
                "loss_scale.init_scale must lie between min_scale and max_scale, got "
                f"init_scale={self.init_scale:g}, min_scale={self.min_scale:g} and "
                f"max_scale={self.max_scale:g}. Change the one that you did not mean."
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ConfigError(
                "loss_scale.growth_interval and hysteresis must be at least 1, got "
                f"{self.growth_interval} and {self.hysteresis}."
            )


def _check_factor(
    name: str, value: float, *, ends: str, least: float = 0.0, most: float = math.inf
) -> None:
    """Raise unless a factor is a power of two within its bounds."""
    positive = value > 0 and math.isfinite(value)
    works = min(max(power_of_two_below(value), least), most) if positive else least or most
    if value != works:
        raise ConfigError(
            f"loss_scale.{name} must be a power of two {ends}, so that scaling loses no digits, "
            f"got {value:g}. Write {name}={works:g}."
        )


def power_of_two_below(value: float) -> float:
    """Return the largest power of two that is at most `value`."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"A loss scale must be a positive number, got {value}.")
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


class RunningScale:
    """A loss scale in use: its value and its memory, on the device."""

    def __init__(self, settings: LossScale, device: torch.device) -> None:
        self.settings = settings
        self.value = torch.full((), settings.init_scale, dtype=torch.float32, device=device)
        self._calm = torch.zeros((), dtype=torch.int32, device=device)
        self._strikes = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def can_give_way(self) -> Tensor:
        """Whether an overflow would still move the scale, now or after more of them."""
        lowest = self.settings.min_scale if self.settings.dynamic else self.settings.init_scale
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
        moved = torch.where(back_off, self.value * s.backoff_factor, self.value)
        moved = torch.where(grow, moved * s.growth_factor, moved)
        self.value.copy_(moved.clamp(s.min_scale, s.max_scale))
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
