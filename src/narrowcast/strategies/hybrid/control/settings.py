"""Settings of hybrid training: how long phases last, and how sure a prediction must be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from narrowcast.config.common.strategy import WARMUP
from narrowcast.errors import RecipeError
from narrowcast.precision.plan.policy import suggestion

Preset = Literal["conservative", "balanced", "aggressive"]
PRESETS: tuple[Preset, ...] = get_args(Preset)


@dataclass(frozen=True, kw_only=True)
class PhaseSettings:
    """What decides how long each phase lasts and when a prediction may begin."""

    warmup_steps: int = 100
    """Steps of ordinary training before anything is learned or predicted."""
    full_steps: int = 20
    """Steps of ordinary training between predictions; twice as many after a Warning."""
    max_predict_steps: int = 15
    """The longest prediction."""
    min_predict_steps: int = 10
    """The shortest one, where `max_predict_steps` allows as many."""
    confidence_threshold: float = 0.85
    """How probable it must be that a prediction is accepted."""
    divergence_sigma: float = 3.0
    """How many times the noise of a batch the loss may rise above its mean."""
    max_consecutive: int = 5
    """Predictions before ordinary training has its turn whatever the confidence."""
    fallback_sigma: float = 3.0
    """A prediction is given up where the loss rises so many deviations above its mean."""
    validation_samples: int = 5
    """Steps of a correction: batches whose loss is compared with the predicted one."""
    max_correction: float = 0.1
    """The most that a correction may change, as a share of what was predicted."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _refuse_count(name, getattr(self, name), least=least)
        if not 0 < self.confidence_threshold < 1:
            raise RecipeError(
                f"confidence_threshold={self.confidence_threshold:g} is no probability that can be "
                "reached and missed; write one between 0 and 1, such as 0.85"
            )
        for name in ("divergence_sigma", "fallback_sigma", "max_correction"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise RecipeError(
                    f"{name}={value:g} would see everything or nothing; "
                    f"write a positive number, such as {_USUAL[name]:g}"
                )

    @classmethod
    def preset(cls, name: str) -> "PhaseSettings":
        """Return the settings of a name: conservative, balanced or aggressive."""
        if name not in _PRESETS:
            raise RecipeError(
                f"no preset of phases is named {name!r}{suggestion(name, PRESETS)}; "
                f"the presets are {', '.join(PRESETS)}"
            )
        return _PRESETS[name]


_LEAST = {
    "warmup_steps": 0,
    "full_steps": 1,
    "max_predict_steps": 1,
    "min_predict_steps": 1,
    "max_consecutive": 1,
    "validation_samples": 1,
}
_USUAL = {"divergence_sigma": 3.0, "fallback_sigma": 3.0, "max_correction": 0.1}


def _refuse_count(name: str, value: object, *, least: int) -> None:
    """Refuse what is no number of steps, an infinity too: a phase has to end."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RecipeError(
            f"{name}={value} is no number of steps, and a phase has to end; "
            f"write a whole number from {least}"
        )
    if value < least:
        raise RecipeError(
            f"{name}={value} leaves a phase without steps; write a whole number from {least}"
        )


_PRESETS: Mapping[str, PhaseSettings] = {
    "conservative": PhaseSettings(
        warmup_steps=WARMUP["conservative"],
        full_steps=30,
        max_predict_steps=25,
        confidence_threshold=0.90,
        divergence_sigma=2.2,
    ),
    "balanced": PhaseSettings(
        warmup_steps=WARMUP["balanced"],
        full_steps=20,
        max_predict_steps=40,
        confidence_threshold=0.85,
        divergence_sigma=2.5,
    ),
    "aggressive": PhaseSettings(
        warmup_steps=WARMUP["aggressive"],
        full_steps=15,
        max_predict_steps=80,
        confidence_threshold=0.75,
        divergence_sigma=3.5,
    ),
}
