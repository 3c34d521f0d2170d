"""Statistics of each tensor over the run: from columns by step to a series by tensor."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

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
    def format(self) -> str:
        """The format it had last."""
        return self.formats[-1]

    def worst(self, measure: str) -> tuple[float, int] | None:
        """Return the worst value of a measure and its place among the samples, the first such."""
        found = [x for x in self.values[measure] if x is not None]
        if not found:
            return None
        value = worst(measure, found)
        return value, self.values[measure].index(value)


def tensors(records: Sequence[HealthRecord]) -> list[Tensor]:
    """Collect every tensor that was ever sampled, in the order of the model, then of the step."""
    n = len(records)
    series: dict[tuple[str, str], dict[str, list[float | None]]] = {}
    formats: dict[tuple[str, str], dict[str, None]] = {}
    done = 0
    # Records of the same tensors in a row are transposed at once: a run has thousands.
    for (modules, roles), group in groupby(records, key=lambda r: (r.module, r.role)):
        alike = list(group)
        for measure in COLLECTED:
            columns = zip(*(_measured(record, measure) for record in alike), strict=True)
            for key, values in zip(zip(modules, roles, strict=True), columns, strict=True):
                own = series.setdefault(key, {}).setdefault(measure, [None] * n)
                _put(own, values, at=done, measure=measure)
        for names in dict.fromkeys(record.format for record in alike):
            for key, name in zip(zip(modules, roles, strict=True), names, strict=True):
                known = formats.setdefault(key, {})
                known.pop(name, None)
                known[name] = None
        done += len(alike)
    found = [
        Tensor(
            module=module,
            role=role,
            formats=tuple(formats[module, role]),
            values={measure: tuple(values) for measure, values in own.items()},
        )
        for (module, role), own in series.items()
    ]
    place = {module: i for i, module in enumerate(dict.fromkeys(t.module for t in found))}
    return sorted(found, key=lambda t: (place[t.module], role_place(t.role), t.role))


def worst(measure: str, values: Sequence[float]) -> float:
    """Choose the worst of some values: the least SNR, the greatest of everything else."""
    return min(values) if measure == "snr_db" else max(values)


def role_place(role: str) -> int:
    """Return where a role stands in a step."""
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _measured(record: HealthRecord, measure: str) -> Values:
    column: Values = getattr(record, measure)
    if measure == "snr_db":
        return tuple(x if x is None or math.isfinite(x) else _told(x) for x in column)
    if measure == "amax":
        # No comparison finds NaN, and both are the same bad news.
        return tuple(math.inf if x is None or math.isnan(x) else x for x in column)
    return column


def _told(x: float) -> float:
    return EXACT if x > 0 else BROKEN


def _put(own: list[float | None], values: Values, *, at: int, measure: str) -> None:
    """Write values into a series; where a record names a tensor twice, the worse one stays."""
    before = own[at : at + len(values)]
    if any(x is not None for x in before):
        pick: Callable[[float | None, float | None], float | None] = partial(_worse, measure)
        values = tuple(map(pick, before, values))
    own[at : at + len(values)] = values


def _worse(measure: str, a: float | None, b: float | None) -> float | None:
    found = [x for x in (a, b) if x is not None]
    return worst(measure, found) if found else None
