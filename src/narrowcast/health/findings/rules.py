"""What can be seen to go wrong in the statistics of a tensor or in a loss: one rule a function."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import NamedTuple

from narrowcast.numerics import FP16
from narrowcast.precision.gradients.loss_scale import LossScale, power_of_two_below
from narrowcast.precision.plan.module_plan import GRADIENTS
from narrowcast.precision.plan.wording import Wording

SATURATED = 1e-3
"""Share of values beyond the range of an 8-bit format above which a layer saturates."""
VANISHED = 0.25
"""Share of a gradient that rounds to zero above which it vanishes."""
LOST = 0.5
"""Share of lost updates above which weights stand still."""
NEAR_ZERO = 0.01
"""Of the highest learning rate so far: below it a schedule is taken to begin or to end."""
GROWN = 16.0
"""Growth of a largest magnitude that counts as drift."""
STEADY = 6
"""Readings in a row that show drift. Fewer give false alarms in 200 readings of 1,000 tensors."""
SPIKE = 8.0
"""A loss that is so many times the usual distance of neighbours above the last few is a spike."""
RECENT = 8
REMEMBERED = 64
"""Looks, or steps, that a rule compares with."""
CALM = 3
"""Looks without a trouble after which it is over."""

EIGHT_BITS = frozenset({"e4m3", "e5m2", "e2m1", "mxfp8", "nvfp4"})


class TensorHistory(NamedTuple):
    """One tensor of one look."""

    module: str
    role: str
    format: str
    amax: float
    overflow: float
    underflow: float
    subnormal: float
    nonfinite: float
    past: Sequence[float]
    """Its largest magnitudes in the looks before, the latest last."""


class Trouble(NamedTuple):
    """What a rule reports."""

    kind: str
    """Which rule; each kind, module and role is reported once."""
    module: str
    role: str
    what: str
    why: str
    advice: str


Rule = Callable[[TensorHistory, Wording], Iterator[Trouble]]
"""Looks at one tensor, and writes as its owner does."""


def overflow(seen: TensorHistory, terms: Wording) -> Iterator[Trouble]:
    """Values beyond a format that does not saturate."""
    if seen.format not in EIGHT_BITS and seen.overflow > 0:
        yield _overflowing(seen, seen.overflow, terms)


def saturation(seen: TensorHistory, names: Wording) -> Iterator[Trouble]:
    """Values beyond an 8-bit format, which become its largest."""
    if seen.format in EIGHT_BITS and seen.overflow > SATURATED:
        yield Trouble(
            "saturation",
            seen.module,
            seen.role,
            f"saturation of {seen.format}",
            f"{percent(seen.overflow)} of the values, largest {seen.amax:.3g}",
            f"try {_wider(seen, names)}",
        )


def vanishing(seen: TensorHistory, terms: Wording) -> Iterator[Trouble]:
    """Gradients that round to zero."""
    if seen.role in GRADIENTS and seen.underflow > VANISHED:
        larger = f"a larger {terms.loss_scale('max_scale')}, if nothing overflows, or "
        scaled = larger if seen.format == "fp16" else ""
        yield Trouble(
            "vanishing",
            seen.module,
            seen.role,
            f"gradients below {seen.format}",
            f"{percent(seen.underflow)} of the values round to zero",
            f"try {scaled}{_wider(seen, terms)}",
        )


def dead(seen: TensorHistory, terms: Wording) -> Iterator[Trouble]:
    """A module that gives or gets nothing but zeros, look after look."""
    if seen.role not in ("output", "grad_output") or seen.amax > 0 or seen.nonfinite:
        return
    if len(seen.past) >= CALM and not any(seen.past[-CALM:]):
        yield Trouble(
            "dead",
            seen.module,
            seen.role,
            "dead layer",
            f"its {seen.role.replace('_', ' ')} is zero",
            f"check the activation before it, or try a lower {terms.lr}",
        )


def drift(seen: TensorHistory, terms: Wording) -> Iterator[Trouble]:
    """Report a largest magnitude, except a gradient's, that has grown for STEADY readings."""
    if seen.role not in ("input", "weight", "output"):
        return
    past = [value for value in seen.past if 0 < value < math.inf]
    if len(past) < REMEMBERED // 2 or not seen.amax < math.inf:
        return
    usual = max(past[: len(past) // 2])
    if min(seen.amax, *past[1 - STEADY :]) > GROWN * usual:
        yield Trouble(
            "drift",
            seen.module,
            seen.role,
            "magnitudes grow",
            f"largest {seen.amax:.3g}, usually {usual:.3g}",
            f"try a lower {terms.lr} or {terms.clip}, or keep monitoring it",
        )


def first_nonfinite(seen: Sequence[TensorHistory], terms: Wording) -> Iterator[Trouble]:
    """Report where inf or NaN began; in gradients, that is nearest the loss.

    Only fp16 overflows: other formats have the range of fp32, or saturate.
    """
    bad = [each for each in seen if each.nonfinite]
    forward = [each for each in bad if each.role not in GRADIENTS]
    if not bad:
        return
    first = forward[0] if forward else bad[-1]
    arrived = first is seen[0] and first.role == "input"
    if first.format == "fp16" and not arrived and first.role not in ("weight", "update"):
        yield _overflowing(first, first.nonfinite, terms)
    else:
        yield _not_finite(first, terms, arrived=arrived)


RULES: tuple[Rule, ...] = (overflow, saturation, vanishing, dead, drift)


def spike(loss: float, past: Sequence[float]) -> str:
    """Return how a loss lies outside what was usual; nothing if it does not."""
    if len(past) < REMEMBERED // 2 or not math.isfinite(loss):
        return ""
    # Of the last few, and of the differences of neighbours: a run that learns moves by itself.
    usual = median(islice(past, len(past) - RECENT, None))
    distance = median(abs(a - b) for a, b in pairwise(past))
    if loss - usual > SPIKE * max(distance, 1e-3 * abs(usual)):
        return f"{loss:.4g}, usually {usual:.4g}"
    return ""


def _overflowing(seen: TensorHistory, share: float, terms: Wording) -> Trouble:
    return Trouble(
        "overflow",
        seen.module,
        seen.role,
        f"overflow of {seen.format}",
        f"{percent(share)} of the values, largest {seen.amax:.3g}",
        f"try {_wider(seen, terms)}",
    )


def _not_finite(seen: TensorHistory, terms: Wording, *, arrived: bool) -> Trouble:
    """Report NaN or inf that no wider format would have held."""
    if arrived:
        advice = "check the data: the value was already in the input"
    elif seen.role in ("weight", "update"):
        advice = f"restore an earlier checkpoint, and try a lower {terms.lr}"
    else:
        advice = (
            f"check the data, try a lower {terms.lr}, or call narrowcast.explain to see which "
            "value became bad first"
        )
    share = f"{percent(seen.nonfinite)} of the values are NaN or inf"
    return Trouble("nonfinite", seen.module, seen.role, "not finite", share, advice)


def _wider(seen: TensorHistory, terms: Wording) -> str:
    """Return how a module gets the format above the one in force."""
    wider = "fp32" if seen.format in ("bf16", "tf32") else "bf16"
    # What goes into a module not finite was made by the code around it, in that one's format.
    made_outside = seen.role == "input" and seen.nonfinite > 0
    module = seen.module.rpartition(".")[0] if made_outside else seen.module
    return terms.wider(module, wider)


def percent(share: float) -> str:
    """Write a share."""
    return f"{100 * share:.3g} %"


LOW = 0.5
"""Share of a gradient below the smallest number with all its digits that a larger scale is for."""
SPARE = 16.0
"""A suggested scale leaves so much above the largest gradient seen: samples miss the rarest."""


def floor(scale: float, settings: LossScale, terms: Wording) -> Iterator[Trouble]:
    """A scale that overflows have brought down to its smallest value."""
    if settings.dynamic and scale <= settings.min_scale < settings.init_scale:
        yield Trouble(
            "floor",
            "",
            "loss scale",
            "loss scale at its floor",
            f"overflows have lowered it from {settings.init_scale:g} to {scale:g}, its minimum",
            "try bf16 for the modules that the skipped steps name"
            f"{' (precision.overrides)' if terms.in_recipe else ''}, or a smaller "
            f"{terms.loss_scale('min_scale')}",
        )


def low(
    seen: Sequence[TensorHistory], scale: float, settings: LossScale, names: Wording
) -> Iterator[Trouble]:
    """Report gradients lost at the lower end of fp16 while there is room at its upper end."""
    gradients = [each for each in seen if each.format == FP16.name and each.role in GRADIENTS]
    largest = max((each.amax for each in gradients), default=0.0)
    if not 0 < largest < FP16.largest:
        return
    worst = max(gradients, key=_below)
    possible = power_of_two_below(min(settings.max_scale, scale * FP16.largest / (SPARE * largest)))
    if _below(worst) > LOW and possible > scale:
        initial = names.loss_scale("init_scale", f"{possible:g}")
        setting = names.loss_scale("growth_interval")
        interval = f" or a {setting} below {settings.growth_interval}"
        yield Trouble(
            "low",
            "",
            "loss scale",
            "loss scale too low",
            f"{percent(_below(worst))} of {worst.module} {worst.role} lies below "
            f"{FP16.smallest_normal:.2g}, where fp16 loses precision and then flushes to zero; "
            f"the scale is {scale:g}",
            f"try {initial}{interval if settings.dynamic else ''}",
        )


def _below(seen: TensorHistory) -> float:
    return seen.underflow + seen.subnormal
