"""The heat map: what every tensor lost, with the worst sample of each column of steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from narrowcast.report.layers import width
from narrowcast.report.phrases import count, decibels, proportion, value
from narrowcast.runs.records import HealthRecord

MEASURES = ("snr_db", "overflow", "underflow", "nonfinite")
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
    """By measure, one per sampled step; None if not measured."""

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
    """Return the position of a role within a step."""
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
    """Join the stretches in which a tensor was sampled, with the worst value of each step."""
    if len(parts) == 1 and len(parts[0][1]) == samples:
        return parts[0][1]
    whole: list[float | None] = [None] * samples
    for at, values in parts:
        before = whole[at : at + len(values)]
        whole[at : at + len(values)] = [
            worst(measure, pair) for pair in zip(before, values, strict=True)
        ]
    return tuple(whole)


MOST_COLUMNS = 180
MOST_ROWS = 24
"""Modules that are shown before a reader asks for all; about a screen."""
WORST_TENSORS = 12
"""Rows of the table beside the map."""
SATURATED = 0.001
"""Share beyond a format from which a run finds that it saturates; an SNR may hide it."""
CALM_DB = 20.0
"""Above it no cell of the map stands out; well-scaled tensors reach 25 dB in e5m2."""

TITLES = {
    "snr_db": "SNR of the cast",
    "overflow": "overflowed",
    "underflow": "flushed to zero",
    "nonfinite": "not finite",
}


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """What the page draws, and the same in words."""

    data: dict[str, Any]
    """For the page's script; see `heat_map`."""
    alt: str
    note: str
    measures: tuple[tuple[str, str], ...]
    """Those that hold anything to see: name and title."""
    opens: str
    """The one that is shown first."""
    roles: tuple[str, ...]
    modules: int
    worst: tuple[dict[str, Any], ...]
    """Rows of the table: a tensor, and the worst that happened to it."""


def heat_map(records: Sequence[HealthRecord]) -> HeatMap | None:
    """Return the heat map of a run, or None without samples.

    Its data: `edges` of the columns in steps, `spans` (first and last sampled step of each), `rows`
    (module, role, format), and for each measure a row of values by tensor: a list, or one number
    where it never changes.
    """
    records = sorted(records, key=lambda record: record.step)
    matches = tensors(records)
    if not matches:
        return None
    steps = [record.step for record in records]
    cuts = _cuts(len(steps))
    measures = [m for m in MEASURES if m == "snr_db" or any(any(t.values[m]) for t in matches)]
    rows = {m: [_short(_columns(t, m, cuts=cuts), m) for t in matches] for m in measures}
    ranked = _ranked(matches)
    return HeatMap(
        data={
            "edges": _edges(steps, cuts),
            "spans": [[steps[a], steps[b - 1]] for a, b in cuts],
            "rows": [[t.module, t.role, _formats(t)] for t in matches],
            "measures": rows,
            "most": MOST_ROWS,
        },
        alt=_alt(matches, ranked[0], steps=steps),
        note=_note(len(steps), len(cuts)),
        measures=tuple((m, TITLES[m]) for m in measures),
        opens=_opens(matches),
        roles=tuple(sorted({t.role for t in matches}, key=lambda r: (role_index(r), r))),
        modules=len({t.module for t in matches}),
        worst=tuple(_worst_tensor(t, steps) for t in ranked[:WORST_TENSORS]),
    )


def _cuts(samples: int) -> list[tuple[int, int]]:
    """Divide the samples into columns as evenly as whole numbers allow."""
    columns = min(samples, MOST_COLUMNS)
    at = [k * samples // columns for k in range(columns + 1)]
    return list(pairwise(at))


def _edges(steps: Sequence[int], cuts: Sequence[tuple[int, int]]) -> list[float]:
    """Draw the line between two columns halfway between their nearest samples."""
    inner = [(steps[b - 1] + steps[b]) / 2 for _, b in cuts[:-1]]
    reach = max(0.5, (steps[1] - steps[0]) / 2) if len(steps) > 1 else 0.5
    return [steps[0] - reach, *inner, steps[-1] + reach]


def _columns(
    tensor: Tensor, measure: str, *, cuts: Sequence[tuple[int, int]]
) -> list[float | None]:
    values = tensor.values[measure]
    if measure != "snr_db" and None not in values and not any(values):
        return [0.0] * len(cuts)  # as most are
    return [worst(measure, values[a:b]) for a, b in cuts]


def _short(columns: list[float | None], measure: str) -> float | list[float | None] | None:
    """Round to the digits a reader can use; a row that never changes becomes one number."""
    if measure == "snr_db":
        rounded = [None if x is None else round(x, 1) for x in columns]
    else:
        rounded = [None if x is None else float(f"{x:.3g}") or 0 for x in columns]
    return rounded[0] if len(set(rounded)) == 1 else rounded


def _ranked(matched: Sequence[Tensor]) -> list[Tensor]:
    """Sort tensors: non-finite ones in the order a step computes them, saturating ones, low SNR."""
    location = {module: i for i, module in enumerate(dict.fromkeys(t.module for t in matched))}

    def key(tensor: Tensor) -> tuple[float, ...]:
        at = tensor.broke()
        if at is not None:
            role, module = role_index(tensor.role), location[tensor.module]
            # Gradients come after all outputs, from the last module to the first.
            order = (0, module, role) if role <= role_index("output") else (role, -module, 0)
            return (0, at, *order)
        snr, overflow, underflow = [tensor.worst(m) for m in MEASURES[:3]]
        beyond, flushed = [-x[0] if x else 0.0 for x in (overflow, underflow)]
        return (1, beyond * _saturates(tensor), snr[0] if snr else EXACT, beyond, flushed)

    return sorted(matched, key=key)


def _worst_tensor(tensor: Tensor, steps: Sequence[int]) -> dict[str, Any]:
    results = {m: tensor.worst(m) for m in COLLECTED}
    snr, amax, broke = results["snr_db"], results["amax"], tensor.broke()
    lost = results["overflow"] if _saturates(tensor) or not snr else snr
    decisive = broke if broke is not None else lost[1] if lost else None
    shares = {
        m: proportion(x[0]) if (x := results[m]) else "–"
        for m in ("overflow", "underflow", "nonfinite", "subnormal")
    }
    return {
        "module": tensor.module,
        "role": tensor.role,
        "formats": tensor.formats,
        "snr": snr_text(snr[0]) if snr else "–",
        "amax": value(amax[0]) if amax else "–",
        "step": "–" if decisive is None else count(steps[decisive]),
        **shares,
    }


def snr_text(x: float) -> str:
    """Format an SNR, or its replacement."""
    if x == EXACT:
        return "exact"
    return "not finite" if x == BROKEN else decibels(x)


def _saturates(tensor: Tensor) -> bool:
    matches = tensor.worst("overflow")
    return matches is not None and matches[0] > SATURATED


def _opens(matches: Sequence[Tensor]) -> str:
    """Choose what the map shows first: overflows where the SNR would show a calm run."""
    lows = [snr[0] for tensor in matches if (snr := tensor.worst("snr_db"))]
    calm = min(lows, default=EXACT) > CALM_DB
    return "overflow" if calm and any(_saturates(t) for t in matches) else "snr_db"


def _formats(tensor: Tensor) -> str:
    return ", then ".join(tensor.formats)


def _alt(matches: Sequence[Tensor], first: Tensor, *, steps: Sequence[int]) -> str:
    modules = count(len({t.module for t in matches}), "module")
    worst_by_measure = {m: x[0] for m in MEASURES if (x := first.worst(m))}
    snr = worst_by_measure.pop("snr_db", BROKEN)
    parts = [f"SNR {snr_text(snr)}"] if snr != BROKEN else []
    parts += [f"{proportion(x)} {TITLES[m]}" for m, x in worst_by_measure.items() if x > 0]
    message = f", at its worst {', '.join(parts)}" if parts else ""
    broke = first.broke()
    sampled = f"{modules}, {count(len(matches), 'tensor')}, sampled at {count(len(steps), 'step')}"
    if broke is None and not parts and not first.worst("snr_db"):
        return f"{sampled}; no cast lost any values."
    which = "worst" if broke is None else f"first non-finite one, at step {count(steps[broke])},"
    return (
        f"{sampled}; the {which} is the {first.role} of {first.module or 'the model itself'} in "
        f"{_formats(first)}{message}."
    )


def _note(samples: int, columns: int) -> str:
    if samples <= columns:
        return "Each column is one sampled step."
    least, most = samples // columns, -(-samples // columns)
    how_many = str(least) if least == most else f"{least} or {most}"
    return f"Each column is the worst of {how_many} sampled steps."
