"""The heat map: what every tensor lost, over the run, with the worst of each stretch of steps.

A screen has a few hundred columns to give, a long run has thousands of samples. Each column is the
worst of the samples it stands for, so that one bad step stays visible however long the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from narrowcast.report.charts.tensors import (
    BROKEN,
    COLLECTED,
    EXACT,
    MEASURES,
    Tensor,
    role_index,
    tensors,
    worst,
)
from narrowcast.report.phrases import count, decibels, proportion, value
from narrowcast.runs.records import HealthRecord

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
    worst: tuple["WorstTensor", ...]


@dataclass(frozen=True, kw_only=True)
class WorstTensor:
    """A row of the table: a tensor, and the worst that happened to it."""

    module: str
    role: str
    formats: tuple[str, ...]
    snr: str
    overflow: str
    underflow: str
    nonfinite: str
    subnormal: str
    amax: str
    step: str
    """When it was at its worst."""


def heat_map(records: Sequence[HealthRecord]) -> HeatMap | None:
    """Make the heat map of a run; nothing where nothing was sampled.

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
    measures = [m for m in MEASURES if m == "snr_db" or _any(matches, m)]
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
    """Keep the digits a reader can use, and one number for a row that never changes."""
    if measure == "snr_db":
        rounded = [None if x is None else round(x, 1) for x in columns]
    else:
        rounded = [None if x is None else float(f"{x:.3g}") or 0 for x in columns]
    return rounded[0] if len(set(rounded)) == 1 else rounded


def _any(result: Sequence[Tensor], measure: str) -> bool:
    return any(any(tensor.values[measure]) for tensor in result)


def _ranked(matched: Sequence[Tensor]) -> list[Tensor]:
    """Sort tensors by what hurts most: those that broke, those that saturate, little signal.

    An infinity spreads to all that is made from it. In the order in which a step makes tensors, the
    first to break is the one nearest the cause.
    """
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


def _worst_tensor(tensor: Tensor, steps: Sequence[int]) -> WorstTensor:
    results = {m: tensor.worst(m) for m in COLLECTED}
    snr, amax, broke = results["snr_db"], results["amax"], tensor.broke()
    lost = results["overflow"] if _saturates(tensor) or not snr else snr
    decisive = broke if broke is not None else lost[1] if lost else None
    shares = {
        m: proportion(x[0]) if (x := results[m]) else "–"
        for m in ("overflow", "underflow", "nonfinite", "subnormal")
    }
    return WorstTensor(
        module=tensor.module,
        role=tensor.role,
        formats=tensor.formats,
        snr=snr_text(snr[0]) if snr else "–",
        amax=value(amax[0]) if amax else "–",
        step="–" if decisive is None else count(steps[decisive]),
        **shares,
    )


def snr_text(x: float) -> str:
    """Write an SNR, or what stands in its place."""
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
    which = "worst" if broke is None else f"first to break, at step {count(steps[broke])},"
    return (
        f"{sampled}; the {which} is {first.role} of {first.module or 'the model itself'} in "
        f"{_formats(first)}{message}."
    )


def _note(samples: int, columns: int) -> str:
    if samples <= columns:
        return "Each column is one sampled step."
    least, most = samples // columns, -(-samples // columns)
    how_many = str(least) if least == most else f"{least} or {most}"
    return f"Each column is the worst of {how_many} sampled steps."
