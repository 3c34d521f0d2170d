"""Precision for the four phases of hybrid predictive training: warmup, full, predict, correct."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from narrowcast.errors import ConfigError
from narrowcast.numerics import FORMATS
from narrowcast.precision.plan.policy import policy_from, suggestion

Phase = Literal["warmup", "full", "predict", "correct"]
PHASES: tuple[Phase, ...] = get_args(Phase)

RECOMMENDED: Mapping[Phase, str] = {
    "warmup": "fp32",
    "full": "fp32",
    "predict": "bf16",
    "correct": "fp32",
}
"""What a phase has where nothing is said of it and recommendations are wanted."""


@dataclass(frozen=True, kw_only=True)
class PhasePolicies:
    """Which policy each of the four phases has.

    What is said of a phase goes before what is recommended for it, and that before the default.
    """

    enabled: bool = True
    """False: fp32 in every phase, whatever else is said."""
    default: str = "fp32"
    """The policy of phases of which nothing is said, without recommendations."""
    overrides: Mapping[Phase, str] = field(default_factory=dict)
    """Policies of single phases."""
    auto_recommend: bool = True
    """Whether phases of which nothing is said have what is recommended for them."""

    def __post_init__(self) -> None:
        for phase in self.overrides:
            _check_phase(phase)
        for text in (self.default, *self.overrides.values()):
            policy_from(text)  # raises for an invalid policy

    @classmethod
    def conservative(cls) -> "PhasePolicies":
        """Return fp32 in every phase."""
        return cls(overrides=dict.fromkeys(PHASES, "fp32"))

    @classmethod
    def aggressive(cls) -> "PhasePolicies":
        """Return bf16 in full and fp16 in predict, where no gradient can overflow; fp32 else."""
        return cls(overrides={**RECOMMENDED, "full": "bf16", "predict": "fp16"})

    def policy(self, phase: Phase) -> str:
        """Return the policy of a phase, as text."""
        _check_phase(phase)
        if not self.enabled:
            return "fp32"
        recommended = RECOMMENDED[phase] if self.auto_recommend else self.default
        return self.overrides.get(phase, recommended)

    def with_phase(self, phase: Phase, policy: str) -> "PhasePolicies":
        """Return the same with another policy for one phase."""
        return replace(self, overrides={**self.overrides, phase: policy})

    def share_of_fp32(self, distribution: Mapping[Phase, float]) -> float:
        """Return the bytes of a number computed with, of fp32's, on average over the steps.

        `distribution` is the share of steps spent in each phase, 1 in all. It is an average: the
        most memory a run needs at any time is that of its widest phase.
        """
        _check_distribution(distribution)
        return math.fsum(
            share * bytes_a_number(self.policy(phase)) / 4 for phase, share in distribution.items()
        )

    def memory_savings(self, distribution: Mapping[Phase, float]) -> float:
        """Return the saving, 1 minus `share_of_fp32`."""
        return 1 - self.share_of_fp32(distribution)


def bytes_a_number(policy: str) -> float:
    """Return the bytes of a number in the format a policy multiplies in, scales included."""
    return FORMATS[policy_from(policy).forward].bytes


def _check_phase(phase: str) -> None:
    if phase not in PHASES:
        raise ConfigError(
            f"There is no phase {phase!r}{suggestion(phase, PHASES)}. The phases are "
            f"{', '.join(PHASES)}."
        )


def _check_distribution(distribution: Mapping[Phase, float]) -> None:
    for phase, share in distribution.items():
        _check_phase(phase)
        if not 0 <= share <= 1:
            raise ConfigError(f"The share of phase {phase} must be between 0 and 1, got {share:g}.")
    whole = math.fsum(distribution.values())
    if not math.isclose(whole, 1, abs_tol=1e-6):
        raise ConfigError(f"The shares of the phases must add up to 1, got {whole:g}.")
