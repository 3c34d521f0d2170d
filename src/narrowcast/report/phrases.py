"""Numbers and settings as a reader writes them: counts, sizes, durations, losses, YAML."""

import math
import re
from typing import Any

from narrowcast.runs import strict_json
from narrowcast.runs.task_info import Metric

_FOUR_DIGITS = Metric(name="").text
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def count(n: int, noun: str = "") -> str:
    """Write `n` in full, with its noun in the right number: `1,000 steps`, `1 step`."""
    if not noun:
        return f"{n:,}"
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def large(n: float) -> str:
    """Write `n` to three digits with its unit of thousands: `1.05 M`."""
    return _with_unit(n, base=1000.0, units=("", " k", " M", " B", " T"))


def size(n_bytes: float) -> str:
    """Write a number of bytes to three digits, in units of 1024: `3.91 MiB`."""
    return _with_unit(n_bytes, base=1024.0, units=(" B", " KiB", " MiB", " GiB", " TiB"))


def duration(seconds: float) -> str:
    """Write a duration in the two largest units that matter: `1 min 32 s`."""
    if not seconds < 1e9:
        return "an unknown time"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def value(x: float) -> str:
    """Format a measured value to four significant digits; NaN and inf are named."""
    if math.isnan(x):
        return "not a number"
    if math.isinf(x):
        return "infinite" if x > 0 else "−infinite"
    if x != 0 and not 1e-3 <= abs(x) < 1e6:
        mantissa, exponent = f"{x:.2e}".split("e")
        return f"{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}".replace("-", "−")
    digits = max(0, 3 - math.floor(math.log10(abs(x)))) if x else 0
    return f"{x:,.{digits}f}".replace("-", "−")


def measured(metric: Metric, x: float) -> str:
    """Write a value of a metric as its task says; to four digits where it says nothing else."""
    if not math.isfinite(x) or metric.text == _FOUR_DIGITS:
        return value(x)
    return metric.written(x).replace("-", "−")


def said(name: str) -> str:
    """Write the name of a metric for a reader; what follows a slash names a module and stays."""
    measure, slash, of = name.partition("/")
    return f"{measure.replace('_', ' ')}{slash}{of}"


def scale(x: float) -> str:
    """Write a loss scale: in full while that is short, else as the power of two it is."""
    if not math.isfinite(x) or x <= 0:
        return value(x)
    if 1 <= x <= 2**20 and x.is_integer():
        return f"{x:,.0f}"
    return power_of_two(x) if math.log2(x).is_integer() else value(x)


def at_scale(x: float) -> str:
    """Format the loss scale of an event; empty if the loss was not scaled."""
    return "" if x == 1 else f", with the loss scale at {scale(x)}"


def power_of_two(x: float) -> str:
    """Write a power of two as one: `2¹⁶`."""
    return f"2{str(round(math.log2(x))).translate(_SUPERSCRIPTS)}"


def capital(text: str) -> str:
    """Return `text` with a capital first letter."""
    return text[:1].upper() + text[1:]


def share(part: float, whole: float) -> str:
    """Write a share in percent; what is neither none nor all never reads as either."""
    if whole <= 0:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.3g} %" if percent >= 10 else f"{percent:.1f} %".replace(".0 %", " %")


def proportion(x: float) -> str:
    """Write a share of elements, of which one in a million can matter."""
    if x == 0:
        return "none"
    return value(x) if x < 1e-3 else share(x, 1)


def decibels(x: float) -> str:
    """Write a ratio of powers: `31.5 dB`."""
    return f"{x:.1f} dB".replace("-", "−")


def _with_unit(n: float, *, base: float, units: tuple[str, ...]) -> str:
    if not math.isfinite(n):
        return value(n)
    rank = 0
    # 999.5 would round to 1000 at three digits: it already belongs to the next unit.
    while abs(n) >= base - 0.5 and rank < len(units) - 1:
        n, rank = n / base, rank + 1
    if rank == 0:
        return f"{n:.0f}{units[0]}"
    digits = 2 if abs(n) < 9.995 else 1 if abs(n) < 99.95 else 0
    return f"{n:.{digits}f}{units[rank]}" if abs(n) < 10 * base else f"{n:.2e}{units[rank]}"


def policies(policy: str, schedule: object) -> str:
    """Return the policy of a run, or of its phases in order: `fp32 → fp8-row`."""
    return " → ".join(name for name, _ in _phases(policy, schedule))


def in_policy(policy: str) -> str:
    """Write how a run trained: `in fp16`, or `with the default policy`."""
    if policy.startswith(("fp", "bf16", "tf32")):
        return f"in {policy}"
    return f"with the {policy} policy" if policy.isalpha() else f"with policy {policy}"


def course(policy: str, schedule: object) -> str:
    """Return the policies of a run with the end of each phase: `fp32 until 30% → fp8-row`."""
    return " → ".join(name + end for name, end in _phases(policy, schedule))


def _phases(policy: str, schedule: object) -> list[tuple[str, str]]:
    """Return the policy and the end of each phase of a resolved recipe."""
    phases = []
    for phase in schedule if isinstance(schedule, list) else []:
        until = phase.get("until")
        if isinstance(until, dict):
            until = next((f"{key} {x}" for key, x in until.items() if x is not None), None)
        name = str(phase.get("policy") or policy)
        phases.append((name, "" if until is None else f" until {until}"))
    return phases or [(policy, "")]


_PLAIN = re.compile(
    r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[a-z_][\w./-]*|[\d.]+%", re.IGNORECASE
)
"""Text that YAML reads as the same text without quotes."""


def written(result: Any) -> str:
    """Write the value of a setting so that a recipe or a command line takes it back."""
    return result if isinstance(result, str) else _flow(result)


def _flow(matched: Any) -> str:
    match matched:
        case str():
            return matched if _PLAIN.fullmatch(matched) else strict_json.dumps(matched)
        case list():
            # A resolved recipe spells out what an entry of a list, such as a phase, leaves out.
            inputs = [
                _requested_entry(item) if isinstance(item, dict) else item for item in matched
            ]
            return f"[{', '.join(map(_flow, inputs))}]"
        case dict():
            return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in matched.items()) + "}"
        case _:
            return strict_json.dumps(matched)


def _requested_entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in entry.items() if x not in (None, {}, [])}
