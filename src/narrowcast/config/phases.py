"""The phases of `precision.schedule`: their settings, and when each ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from narrowcast.config.limits import LARGEST_FP32, LONGEST_POLICY, MOST_OVERRIDES
from narrowcast.config.policy_file import policy_text
from narrowcast.config.section import Section, Steps

LOSSES = 20
"""Steps whose mean loss a condition looks at: the loss of one says more of its batch."""
PERCENT = r"^\d{1,2}(\.\d+)?%$"
HOW_TO_END = "a step (100), a fraction of the run (30%), {calm: 500} or {loss_below: 2.5}"


class ConditionSection(Section):
    """What ends a phase, where neither a step nor a share of the run does."""

    calm: Steps | None = Field(
        default=None, description="consecutive steps of the phase without a skipped step"
    )
    loss_below: float | None = Field(
        default=None,
        ge=-LARGEST_FP32,
        le=LARGEST_FP32,
        description=f"mean training loss of the last {LOSSES} steps of the phase",
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.calm is None) == (self.loss_below is None):
            raise ValueError("set either calm or loss_below")
        return self


PolicyText = Annotated[
    str, Field(min_length=1, max_length=LONGEST_POLICY), AfterValidator(policy_text)
]
"""The text of a policy, or `@` and a policy file, whose text it becomes."""

Until: TypeAlias = int | float | str | ConditionSection


class PhaseSection(Section):
    """A part of the run with a policy of its own."""

    policy: PolicyText | None = Field(
        default=None, description="policy of the phase; none: precision.policy"
    )
    overrides: dict[str, PolicyText] = Field(
        default_factory=dict,
        max_length=MOST_OVERRIDES,
        description="policy per module glob, in addition to precision.overrides",
    )
    until: (
        Steps
        | Annotated[float, Field(gt=0, lt=1)]
        | Annotated[str, Field(pattern=PERCENT)]
        | ConditionSection
        | None
    ) = Field(
        default=None, description=f"the end of the phase: {HOW_TO_END}; none for the last phase"
    )


def last_step(until: Until | None, *, steps: int) -> int | None:
    """Return the last step of a phase; None if that is not known before the run."""
    match until:
        case str():
            return round(float(until.removesuffix("%")) / 100 * steps)
        case float():
            return round(until * steps)
        case int():
            return until
        case _:
            return None


def misplaced(phases: Sequence[PhaseSection], *, steps: int) -> Iterator[str]:
    """Yield which phases of a run of so many steps would have no step."""
    last, number = 0, 0
    for n, phase in enumerate(phases, start=1):
        end = last_step(phase.until, steps=steps)
        if end is None:
            continue
        if end <= last:
            after = f"phase {number} does so at step {last}" if number else "the first step is 1"
            yield f"phase {n} would end at step {end}, and {after}. Let each phase end later"
        elif end >= steps:
            yield (
                f"phase {n} would end at step {end} of {steps}, with no step left for the phase "
                "after it. End it earlier, or at a fraction of the run, e.g. until: 30%"
            )
        last, number = max(last, end), n


def check_ends(phases: Sequence[PhaseSection]) -> Iterator[str]:
    """Yield what is wrong with the ends of phases; the last has none, all others must."""
    for n, phase in enumerate(phases, start=1):
        if n == len(phases) and phase.until is not None:
            yield f"phase {n} is the last and lasts to the end of the run. Leave its until out"
        elif n < len(phases) and phase.until is None:
            yield f"phase {n} has no end. Write until: {HOW_TO_END}"
