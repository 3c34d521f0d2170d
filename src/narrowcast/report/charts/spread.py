"""Exponent histograms: where the magnitudes of a tensor lie, over what its format can hold."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.report.charts import drawing
from narrowcast.report.charts.run_charts import Chart
from narrowcast.report.phrases import count, proportion
from narrowcast.runs.records import ExponentRecord

MOST_CHARTS = 6
"""Beyond the first few, most lie well within their formats."""
HEIGHT = 190


@dataclass(frozen=True)
class Reach:
    """The powers of two of a format's smallest value, smallest normal value and largest value."""

    smallest: int
    normal: int
    largest: int

    @property
    def lowest(self) -> int:
        """The first power of two that does not become zero: more than half the smallest value."""
        return self.smallest - 1


_E4M3, _E2M1 = Reach(-9, -6, 8), Reach(-1, 0, 2)
REACHES = {
    "fp32": Reach(-149, -126, 127),
    "tf32": Reach(-136, -126, 127),
    "bf16": Reach(-133, -126, 127),
    "fp16": Reach(-24, -14, 15),
    "e4m3": _E4M3,
    "e5m2": Reach(-16, -14, 15),
    "e2m1": _E2M1,
    "mxfp8": _E4M3,
    "nvfp4": _E2M1,
}
"""Written out, because the formats themselves bring in torch, and a page needs none."""


def spread_charts(records: Sequence[ExponentRecord]) -> list[Chart]:
    """Draw the worst histogram of each tensor, the one with most outside its format first."""
    worst: dict[tuple[str, str], ExponentRecord] = {}
    for record in records:
        if sum(record.counts):
            key = record.module, record.role
            worst[key] = min(record, worst.get(key, record), key=_rank)
    ranked = sorted(worst.values(), key=lambda r: (*_rank(r), r.module, r.role))
    return [_chart(record, number) for number, record in enumerate(ranked[:MOST_CHARTS])]


def spread_note(records: Sequence[ExponentRecord]) -> str:
    """Return how many tensors have a histogram that is not drawn; empty if all are."""
    tensors = len({(r.module, r.role) for r in records if sum(r.counts)})
    if tensors <= MOST_CHARTS:
        return ""
    return f"{MOST_CHARTS} of {count(tensors)} tensors are shown. The rest are in records.jsonl."


def _rank(record: ExponentRecord) -> tuple[float, float, int]:
    """Rank a histogram: by the share that is lost, then by what lost digits, then by its age."""
    reach, total = REACHES.get(record.format), sum(record.counts)
    fewer = sum(n for e, n in _bins(record) if _where(e, reach) == "subnormal")
    return -sum(_lost(record)), -fewer / total, -record.step


def _lost(record: ExponentRecord) -> tuple[float, float]:
    """Return the shares below and above the range of the format; None if unknown."""
    reach, total = REACHES.get(record.format), sum(record.counts)
    if reach is None:
        return 0.0, 0.0
    below = sum(n for e, n in _bins(record) if e < reach.lowest)
    above = sum(n for e, n in _bins(record) if e > reach.largest)
    return below / total, above / total


def _bins(record: ExponentRecord) -> list[tuple[int, int]]:
    return list(enumerate(record.counts, record.lowest))


def _chart(record: ExponentRecord, number: int) -> Chart:
    below, above = _lost(record)
    held = [e for e, n in _bins(record) if n]
    reach = REACHES.get(record.format)
    low, high = _frame(held[0], held[-1], reach=reach)
    lost = [f"{proportion(below)} below"] * (below > 0) + [f"{proportion(above)} above"] * (
        above > 0
    )
    message = (
        f"{' and '.join(lost)} the format" if lost else "all values within the range of the format"
    )
    layout = drawing.layout([low, high], height=HEIGHT)
    layout.update(
        meta=f"spread{number}",
        showlegend=False,
        hovermode="closest",
        bargap=0.08,
        shapes=_ranges(low, high, reach=reach),
    )
    layout["xaxis"].update(
        range=[low - 0.5, high + 0.5],
        dtick=_stride(high - low),
        tickprefix="2<sup>",
        ticksuffix="</sup>",
        tickformat="d",
        tickangle=0,
    )
    layout["xaxis"].pop("unifiedhovertitle")
    layout["yaxis"].update(type="log", tickformat=".0~p", nticks=4, range=[_floor(record), 0.1])
    return Chart(
        name=f"spread{number}",
        title=f"{record.module or 'the model itself'} · {record.role}",
        alt=f"Magnitudes between 2 to the {held[0]} and 2 to the {held[-1]} at step "
        f"{count(record.step)}; {message}.",
        data=[_bars(record, reach)],
        layout=layout,
        note=f"{record.format}, step {count(record.step)}: {message}.",
    )


def _bars(record: ExponentRecord, reach: Reach | None) -> dict[str, Any]:
    total = sum(record.counts)
    shown = [(e, n) for e, n in _bins(record) if n]
    places = [_where(e, reach) for e, _ in shown]
    colors = {"held": "@series", "subnormal": "@evaluated", "lost": "@skipped"}
    return {
        "type": "bar",
        "x": [e for e, _ in shown],
        "y": [drawing.rounded(n / total) for _, n in shown],
        "text": [
            html.escape(f"{proportion(n / total)}, {location}")
            for (_, n), location in zip(shown, places, strict=True)
        ],
        "textposition": "none",
        "marker": {"color": [colors[position] for position in places], "line": {"width": 0}},
        "hovertemplate": "2<sup>%{x}</sup>: %{text}<extra></extra>",
    }


def _where(exponent: int, reach: Reach | None) -> str:
    if reach is None or reach.normal <= exponent <= reach.largest:
        return "held"
    return "subnormal" if reach.lowest <= exponent < reach.normal else "lost"


def _frame(low: int, high: int, *, reach: Reach | None) -> tuple[int, int]:
    """Show all that was counted, and the ends of the format where they are near."""
    if reach is not None:
        if low - reach.lowest < 24:
            low = min(low, reach.lowest - 1)
        if reach.largest - high < 24:
            high = max(high, reach.largest + 1)
    return low - 1, high + 1


def _ranges(low: int, high: int, *, reach: Reach | None) -> list[dict[str, Any]]:
    """Shade what the format holds behind the bars: normal numbers, and more faintly subnormal."""
    if reach is None:
        return []
    spans = [
        (reach.normal, reach.largest, "@held"),
        (reach.lowest, reach.normal - 1, "@partly"),
    ]
    return [
        {
            "type": "rect",
            "layer": "below",
            "yref": "paper",
            "x0": max(first, low) - 0.5,
            "x1": min(last, high) + 0.5,
            "y0": 0,
            "y1": 1,
            "fillcolor": color,
            "line": {"width": 0},
        }
        for first, last, color in spans
        if last >= low and first <= high
    ]


def _stride(width: int) -> int:
    return next((stride for stride in (1, 2, 4, 8, 16) if width / stride <= 8), 32)


def _floor(record: ExponentRecord) -> float:
    """Return the bottom of the axis, a little under the rarest bin, as a power of ten."""
    rarest = min(n for n in record.counts if n) / sum(record.counts)
    return min(-2.0, math.floor(math.log10(rarest)) - 0.3)
