"""The phases of `precision.schedule`: their settings, when each ends, and what is wrong with them.

All that is wrong with a schedule is said at once, phase by phase, in words of its own: it is a list
of mappings, for which the general words would be vague.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from narrowcast.config.limits import LARGEST_FP32, LONGEST_POLICY, MOST_OVERRIDES, MOST_STEPS
from narrowcast.config.section import Section, check_conflicts

LOSSES = 20
"""Steps whose mean loss a condition looks at: the loss of one says more of its batch."""
PERCENT = r"^\d+(\.\d+)?%$"
HOW_TO_END = "a step (100), a fraction of the run (30%), {calm: 500} or {loss_below: 2.5}"


class ConditionSection(Section):
    """What ends a phase, where neither a step nor a share of the run does."""

    calm: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="consecutive steps of the phase without a skipped step",
    )
    loss_below: float | None = Field(
        default=None,
        ge=-LARGEST_FP32,
        le=LARGEST_FP32,
        description=f"mean training loss of the last {LOSSES} steps of the phase",
    )


PolicyText = Annotated[str, Field(max_length=LONGEST_POLICY)]

Until: TypeAlias = int | float | str | ConditionSection


class PhaseSection(Section):
    """A part of the run with a policy of its own."""

    policy: PolicyText | None = Field(
        default=None, min_length=1, description="policy of the phase; none: precision.policy"
    )
    overrides: dict[str, PolicyText] = Field(
        default_factory=dict,
        max_length=MOST_OVERRIDES,
        description="policy per module glob, in addition to precision.overrides",
    )
    until: (
        Annotated[int, Field(ge=1, le=MOST_STEPS)]
        | Annotated[float, Field(gt=0, lt=1)]
        | Annotated[str, Field(pattern=PERCENT)]
        | ConditionSection
        | None
    ) = Field(default=None, description=f"end of the phase: {HOW_TO_END}; none for the last phase")


def last_step(until: Until | None, *, steps: int) -> int | None:
    """Return the last step of a phase; None where that is not known before the run."""
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
    """Say which phases of a run of so many steps would have no step."""
    last, number = 0, 0
    for n, phase in enumerate(phases, start=1):
        end = last_step(phase.until, steps=steps)
        if end is None:
            continue
        if end <= last:
            after = f"phase {number} does so at step {last}" if number else "the first step is 1"
            yield f"phase {n} would end at step {end}, and {after}; let each phase end later"
        elif end >= steps:
            yield (
                f"phase {n} would end at step {end} of {steps}, and nothing is left for the phase "
                "after it; end it earlier, or at a share of the run, e.g. until: 30%"
            )
        last, number = max(last, end), n


def _check_schedule(value: Any) -> Any:
    """Refuse a schedule that makes no sense, before it is taken apart."""
    if not isinstance(value, list | tuple):
        return value  # refused with the words for any list
    problems = [text for n, item in enumerate(value) for text in _problems(item, n, len(value))]
    check_conflicts([((), text) for text in problems])
    return tuple(value)  # pydantic takes what a validator returns for Python's own, and no list


Schedule = Annotated[tuple[PhaseSection, ...], BeforeValidator(_check_schedule)]


def _problems(item: Any, n: int, count: int) -> Iterator[str]:
    here = f"phase {n + 1}"
    if isinstance(item, PhaseSection):
        item = item.model_dump(exclude_defaults=True)
    if not isinstance(item, Mapping):
        yield f"{here} is {item!r}; write {{policy: bf16, until: 30%}}"
        return
    for key in item:
        if key not in PhaseSection.model_fields:
            close = difflib.get_close_matches(str(key), PhaseSection.model_fields, n=1)
            guess = f"did you mean {close[0]}?" if close else "a phase has policy, overrides, until"
            yield f"{here}: {key}: no such setting; {guess}"
    policy, overrides = item.get("policy"), item.get("overrides", {})
    if not (policy is None or (isinstance(policy, str) and policy)):
        yield f"{here}: policy is {policy!r}; write a preset or the text of a policy"
    if not isinstance(overrides, Mapping) or not all(
        isinstance(text, str) for text in overrides.values()
    ):
        yield f"{here}: overrides is {overrides!r}; write {{head: bf16}}, a policy for each glob"
    until = item.get("until")
    if n == count - 1:
        if until is not None:
            yield f"{here}, the last, lasts to the end of the run; leave its until out"
    elif until is None:
        yield f"{here} has no end; write until: {HOW_TO_END}"
    else:
        yield from (f"{here}: until: {text}" for text in _wrong_ends(until))


def _wrong_ends(until: Any) -> Iterator[str]:
    match until:
        case Mapping():
            yield from _wrong_conditions(until)
        case bool():
            yield f"{str(until).lower()} is no end; write {HOW_TO_END}"
        case int():
            if until < 1:
                yield f"{until} is no step; the first is 1"
        case float():
            if not 0 < until < 1:
                yield f"{until:g} is no share of the run; write a whole step, or 0.3 or 30%"
        case str() if re.match(PERCENT, until):
            if not 0 < float(until[:-1]) < 100:
                yield f"{until} is no share of the run; write one above 0% and below 100%"
        case _:
            yield f"{until!r} is no end; write {HOW_TO_END}"


def _wrong_conditions(settings: Mapping[Any, Any]) -> Iterator[str]:
    until = {name: value for name, value in settings.items() if value is not None}
    if len(until) != 1 or not set(until) <= set(ConditionSection.model_fields):
        yield f"{dict(settings)!r} is no condition; write {{calm: 500}} or {{loss_below: 2.5}}"
        return
    name, value = next(iter(until.items()))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "calm" and not (isinstance(value, int) and number and value >= 1):
        yield f"calm is {value!r}; write how many steps, e.g. {{calm: 500}}"
    if name == "loss_below" and not (number and math.isfinite(value)):
        yield f"loss_below is {value!r}; write a number, e.g. {{loss_below: 2.5}}"
