"""Statistics of each tensor over the run: from columns by step to a series by tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from narrowcast.report.layers import width
from narrowcast.runs.records import HealthRecord

MEASURES = ("snr_db", "overflow", "underflow", "nonfinite")
"""What a heat map can show."""
ROLES = ("input", "weight", "output", "grad_output", "grad_weight", "update")
"""In the order a step meets them; a role of another name comes after them."""

COLLECTED = (*MEASURES, "subnormal", "amax")

EXACT, BROKEN = 1000.0, -1000.0
"""In the place of an SNR: nothing was lost at all; something was not finite."""

Values = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One role of one module, and what its format did to it at every sampled step."""

    module: str
    role: str
    formats: tuple[str, ...]
    """Every format it had, the last one last."""
    values: Mapping[str, Values]
    """By measure, one for each sampled step; None where it was not measured."""

    @property
    def wide(self) -> bool:
        """Whether it only had formats in which what is too large becomes an infinity."""
        return all(width(name) in ("full", "half") for name in self.formats)

    def worst(self, measure: str) -> tuple[float, int] | None:
        """Return the worst value of a measure and its place among the samples, the first such."""
        value = worst(measure, self.values[measure])
        return None if value is None else (value, self.values[measure].index(value))

    def broke(self) -> int | None:
        """Return the first sample in which it held or became something that is not finite."""
        measures = ("nonfinite", "overflow") if self.wide else ("nonfinite",)
        places = [
            next(i for i, x in enumerate(values) if x)
            for values in (self.values[m] for m in measures)
            if any(values)
        ]
        return min(places, default=None)


def tensors(records: Sequence[HealthRecord]) -> list[Tensor]:
    """Collect every tensor that was ever sampled, in the order of the model, then of the step."""
    parts: dict[tuple[str, str], dict[str, list[tuple[int, Values]]]] = {}
    formats: dict[tuple[str, str], dict[str, None]] = {}
    done = 0
    # Records of the same tensors in a row are transposed at once: a run has thousands.
    for (modules, roles), group in groupby(records, key=lambda r: (r.module, r.role)):
        alike = list(group)
        keys = list(zip(modules, roles, strict=True))
        for measure in COLLECTED:
            columns = zip(*(_measured(record, measure) for record in alike), strict=True)
            for key, values in zip(keys, columns, strict=True):
                parts.setdefault(key, {}).setdefault(measure, []).append((done, values))
        for names in dict.fromkeys(record.format for record in alike):
            for key, name in zip(keys, names, strict=True):
                known = formats.setdefault(key, {})
                known.pop(name, None)
                known[name] = None
        done += len(alike)
    matches = [
        Tensor(
            module=module,
            role=role,
            formats=tuple(formats[module, role]),
            values={m: _series(m, parts=own[m], samples=done) for m in COLLECTED},
        )
        for (module, role), own in parts.items()
    ]
    location = {module: i for i, module in enumerate(dict.fromkeys(t.module for t in matches))}
    return sorted(matches, key=lambda t: (location[t.module], role_index(t.role), t.role))


def worst(measure: str, values: Sequence[float | None]) -> float | None:
    """Choose the worst of some values: the least SNR, the greatest of everything else."""
    result: Sequence[float | None] = values
    if None in values:
        result = [x for x in values if x is not None]
    if not result:
        return None
    return min(result) if measure == "snr_db" else max(result)  # type: ignore[type-var]


def role_index(role: str) -> int:
    """Return where a role stands in a step."""
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _measured(record: HealthRecord, measure: str) -> Values:
    column: Values = getattr(record, measure)
    if measure == "snr_db" and any(record.nonfinite):
        # The ratio is of the values that are finite, if there is any: it would look calm.
        pairs = zip(column, record.nonfinite, strict=True)
        column = tuple(BROKEN if share else x for x, share in pairs)
    # One look at the sum saves a look at each of hundreds of thousands of numbers.
    if measure not in ("snr_db", "amax") or (None not in column and math.isfinite(_sum(column))):
        return column
    if measure == "snr_db":
        return tuple(x if x is None or math.isfinite(x) else _rounded(x) for x in column)
    # No comparison finds NaN, and both are the same bad news.
    return tuple(math.inf if x is None or math.isnan(x) else x for x in column)


def _sum(column: Values) -> float:
    return sum(column)  # type: ignore[arg-type]


def _rounded(x: float) -> float:
    return EXACT if x > 0 else BROKEN


def _series(measure: str, *, parts: Sequence[tuple[int, Values]], samples: int) -> Values:
    """Join the stretches in which a tensor was sampled, with None between them.

    Where a record names a tensor twice, the worse value stays.
    """
    if len(parts) == 1 and len(parts[0][1]) == samples:
        return parts[0][1]
    whole: list[float | None] = [None] * samples
    for at, values in parts:
        before = whole[at : at + len(values)]
        whole[at : at + len(values)] = [
            worst(measure, pair) for pair in zip(before, values, strict=True)
        ]
    return tuple(whole)
