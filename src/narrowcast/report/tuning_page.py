"""The page of a search: time against lost progress, and what every group could have had."""

import html
import math
import textwrap
from pathlib import Path
from typing import Any

from narrowcast.precision.plan.policy import short_text
from narrowcast.report.charts import drawing
from narrowcast.report.charts.run_charts import Chart
from narrowcast.report.phrases import size
from narrowcast.report.rendering import render, write_page
from narrowcast.tuning.result import Candidate, TuneResult, milliseconds, percent

SMALLEST = 1e-7
"""Share of lost progress that stands for none on a logarithmic axis."""


def write_tuning_page(result: TuneResult, target: str | Path) -> Path:
    """Write the page of a search to the file `target`."""
    charts = [_front(result)] if result.time_source else []
    columns = _columns(result)
    values = {
        "result": result,
        "text": short_text(result.policy),
        "charts": charts,
        "columns": columns,
        "groups": [
            {
                "label": group.label,
                "layers": len(group.layers),
                "chosen": group.chosen,
                "reason": group.reason,
                "sensitive": group.sensitive,
                "cells": [_cell(group, name) for name in columns],
            }
            for group in result.groups
        ],
        "presets": [
            {
                "policy": each.policy,
                "lost": percent(each.lost),
                "seconds": milliseconds(each.seconds),
                "bytes": size(each.bytes),
                "fits": "yes" if each.fits else "no",
            }
            for each in (_as_chosen(result.predicted), *result.presets)
        ],
    }
    return write_page(Path(target), render("tuning.html", values, charts=charts))


def _columns(result: TuneResult) -> list[str]:
    """Return the names of all options, in the order in which groups list them."""
    names = [option.name for group in result.groups for option in group.options]
    return list(dict.fromkeys(names))


def _cell(group: Any, name: str) -> dict[str, Any]:
    option = next((option for option in group.options if option.name == name), None)
    if option is None:
        return {"lost": "–", "seconds": "", "chosen": False}
    return {
        "lost": percent(option.lost),
        "seconds": milliseconds(option.seconds),
        "chosen": name == group.chosen,
    }


def _as_chosen(candidate: Candidate) -> Candidate:
    return Candidate(
        policy="this policy",
        seconds=candidate.seconds,
        lost=candidate.lost,
        bytes=candidate.bytes,
        fits=candidate.fits,
    )


def _front(result: TuneResult) -> Chart:
    """Draw the policies that no other beats, the presets, and the choice."""
    traces = [
        _points(result.front, name="best policies", color="@series", symbol="circle", line=True),
        _points(result.presets, name="presets", color="@evaluated", symbol="diamond", line=False),
        _points([result.predicted], name="chosen", color="@skipped", symbol="star", line=False),
    ]
    layout = drawing.layout([0, 1], height=420)
    times = [time for trace in traces for time in trace["x"]]
    # fp32 takes fifteen times as long: with it, all others would be a line on the left.
    sixteen = [one.seconds for one in result.presets if one.policy in ("bf16", "fp16")]
    low = min(times, default=0.0)
    high = max(low, *(1.1 * 1e3 * (seconds or 0.0) for seconds in sixteen), traces[2]["x"][0])
    margin = 0.04 * (high - low) or 0.1
    layout["xaxis"] |= {
        "range": [drawing.rounded(low - margin), drawing.rounded(high + margin)],
        "tickformat": "~r",
        "ticksuffix": " ms",
    }
    layout["xaxis"].pop("unifiedhovertitle", None)
    layout["xaxis"].pop("dtick", None)
    layout["yaxis"] |= {"type": "log", "tickformat": "~%", "dtick": 1, "automargin": True}
    shown = [
        y for trace in traces for x, y in zip(trace["x"], trace["y"], strict=True) if x <= high
    ]
    if shown:
        shown.append(result.budget.loss or shown[0])
        powers = [math.log10(min(shown)) - 0.3, math.log10(max(shown)) + 0.3]
        layout["yaxis"]["range"] = [drawing.rounded(power) for power in powers]
    layout["hovermode"] = "closest"
    layout["meta"] = "tuning"
    if result.budget.loss is not None:
        ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": result.budget.loss}
        layout["shapes"] = [drawing.dotted("@quiet") | ends | {"y1": result.budget.loss}]
    return Chart(
        name="front",
        title="Time against lost progress",
        alt=(
            f"The chosen policy takes {milliseconds(result.predicted.seconds)} and loses "
            f"{percent(result.predicted.lost)} of a step's progress."
        ),
        data=traces,
        layout=layout,
        note=(
            "Each point is a policy. The line has the policies that no other beats in both. Time "
            f"is that of the linear layers per micro-batch: {result.time_source}."
            + (" The dotted line is the budget." if result.budget.loss is not None else "")
        ),
    )


def _points(candidates: Any, *, name: str, color: str, symbol: str, line: bool) -> dict[str, Any]:
    known = [each for each in candidates if each.seconds is not None and each.lost < float("inf")]
    label = "%{text}<br>%{x:.4~g} ms, loses %{y:.3~%}<extra></extra>"
    return {
        "type": "scatter",
        "mode": "lines+markers" if line else "markers",
        "name": name,
        "x": [drawing.rounded(each.seconds * 1e3) for each in known],
        "y": [drawing.rounded(max(each.lost, SMALLEST)) for each in known],
        "text": [_wrapped(each.policy) for each in known],
        "hovertemplate": label,
        "line": {"color": color, "width": 1.5},
        "marker": {
            "color": color,
            "symbol": symbol,
            "size": 14 if symbol == "star" else 9 if symbol == "diamond" else 6,
            "line": {"color": "@paper", "width": 1},
        },
    }


def _wrapped(text: str) -> str:
    return "<br>".join(html.escape(part) for part in textwrap.wrap(text, 60, max_lines=6))
