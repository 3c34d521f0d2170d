"""Modules that differ only in an index and are treated alike, as one row of a table."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

FEWEST_ALIKE = 3
"""Two alike are as quick to read as a fold."""

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
T = TypeVar("T")


def groups_alike(
    modules: Sequence[T], *, name: Callable[[T], str], treatment: Callable[[T], Hashable]
) -> list[list[T]]:
    """Return modules in groups that are one row each, in the order of their first."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for module in modules:
        groups[(_INDEX.sub("*", name(module)), treatment(module))].append(module)
    rows = [
        row
        for alike in groups.values()
        for row in ([alike] if len(alike) >= FEWEST_ALIKE else [[one] for one in alike])
    ]
    location = {id(module): i for i, module in enumerate(modules)}
    return sorted(rows, key=lambda row: location[id(row[0])])


def folded(names: Sequence[str]) -> str:
    """Write names that differ in indices as one: `blocks.{0–11}.mlp.up`."""
    if len(names) == 1:
        return names[0] or ". (the model itself)"
    places = [[int(i) for i in _INDEX.findall(name)] for name in names]
    ranges = iter([_ranges(sorted(set(column))) for column in zip(*places, strict=True)])
    return _INDEX.sub(lambda _: next(ranges), names[0])


def _ranges(numbers: list[int]) -> str:
    """Write sorted numbers as ranges in braces: `{0–3, 7}`; a single one stands alone."""
    if len(numbers) == 1:
        return str(numbers[0])
    stretches: list[list[int]] = []
    for n in numbers:
        if stretches and n == stretches[-1][1] + 1:
            stretches[-1][1] = n
        else:
            stretches.append([n, n])
    written = (str(a) if a == b else f"{a}–{b}" for a, b in stretches)
    return "{" + ", ".join(written) + "}"


def decibel_range(matches: Sequence[float]) -> str:
    """Write a range from lowest to highest; empty if there are no values."""
    if not matches:
        return ""
    low, high = f"{min(matches):.1f}", f"{max(matches):.1f}"
    return f"{low} dB" if low == high else f"{low}–{high} dB"
