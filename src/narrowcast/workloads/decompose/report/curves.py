"""Charts of a decomposition: heat maps of matrices, activation densities and trajectories."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowcast.runs import EvalRecord, Record
from narrowcast.runs.report_drawing import (
    COLOURS,
    GRID,
    LINE,
    Scale,
    axes,
    box,
    colour,
    drawing,
    legend,
    line,
    path,
    text_mark,
)
from narrowcast.workloads.decompose.report.matrices import Histogram, Picture
from narrowcast.workloads.decompose.report.schema import TRAJECTORIES

WIDTH, HEIGHT = 460.0, 250.0
WHOLE = "all sites"
"""What a metric without a site is of."""
WIDE = 100
"""Curves that fall or rise by more are drawn over a logarithm."""
MOST_POINTS = 400
"""Of a curve; a longer one is thinned."""
TINTS = 10
"""Shades of a colour; what is below half of the first is left blank."""
POSITIVE, NEGATIVE = "var(--series)", "var(--evaluated)"


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One kind of metric over a run: a curve for each site that has it."""

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]


def trajectories(records: Sequence[Record]) -> list[Trajectory]:
    """Collect the finite metrics of evaluations, by kind."""
    results: dict[str, dict[str, list[tuple[int, float]]]] = {kind: {} for kind in TRAJECTORIES}
    for record in records:
        if not isinstance(record, EvalRecord):
            continue
        for name, value in record.metrics.items():
            kind, _, site = name.partition("/")
            if kind in results and math.isfinite(value):
                results[kind].setdefault(site or WHOLE, []).append((record.step, value))
    return [
        Trajectory(title=title, curves=curves)
        for kind, title in TRAJECTORIES.items()
        if (curves := {site: at for site, at in results[kind].items() if len(at) > 1})
    ]


def trajectory_chart(message: Trajectory) -> str:
    """Draw the curves of one kind, at most as many as there are colours."""
    shown = dict(list(message.curves.items())[:COLOURS])
    steps = [step for curve in shown.values() for step, _ in curve]
    values = [value for curve in shown.values() for _, value in curve]
    x = Scale(min(steps), max(steps), 64, WIDTH - 16)
    wide = min(values) > 0 and max(values) / min(values) > WIDE
    shift = math.log10 if wide else float
    low = shift(min(values)) if wide else min(0.0, *values)
    y = Scale(low, shift(max(values)), HEIGHT - 56, 14)
    marks = _axes(x, y) if wide else axes(x, y, x_label="step", y_label="")
    for location, curve in enumerate(shown.values()):
        points = [(x(step), y(shift(value))) for step, value in _thinned(curve)]
        marks.append(path(points, stroke=colour(location)))
    ends = ", ".join(
        f"{site} from {curve[0][1]:.3g} to {curve[-1][1]:.3g}" for site, curve in shown.items()
    )
    alt = f"{message.title} over evaluations: {ends}."
    chart = drawing(marks, width=WIDTH, height=HEIGHT, alt=alt, most=WIDTH * 1.2)
    named = [(colour(position), site) for position, site in enumerate(shown)]
    left_out = len(message.curves) - len(shown)
    if left_out:
        named.append(("transparent", f"{left_out} more not shown"))
    return chart + (legend(named) if set(message.curves) != {WHOLE} else "")


def _axes(x: Scale, y: Scale) -> list[str]:
    """Draw axes with a logarithmic y axis: a line per power of ten."""
    marks = [text_mark(x.end, y.start + 36, "step", anchor="end")]
    for value, label in x.ticks():
        marks.append(line(x(value), y.start, x(value), y.end))
        marks.append(text_mark(x(value), y.start + 18, label, anchor="middle"))
    powers = range(math.ceil(y.low - 1e-9), math.floor(y.high + 1e-9) + 1)
    for power in [p for p in powers if len(powers) <= 8 or p % 2 == 0]:
        marks.append(line(x.start, y(power), x.end, y(power)))
        marks.append(text_mark(x.start - 8, y(power) + 4, f"{10.0**power:g}", anchor="end"))
    return marks


def _thinned(curve: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    if len(curve) <= MOST_POINTS:
        return curve
    last = len(curve) - 1
    return [curve[round(at * last / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]


def density_chart(result: Histogram, name: str) -> str:
    """Draw the number of components by the share of positions at which they are active."""
    low, high = result.edges[0], result.edges[-1]
    x = Scale(low, high, 48, WIDTH - 16)
    y = Scale(0, max(*result.counts, 1), 140, 22)
    marks = []
    for value, label in y.ticks():
        if value == int(value):
            marks.append(line(x.start, y(value), x.end, y(value), stroke=GRID))
            marks.append(text_mark(x.start - 8, y(value) + 4, label.split(".")[0], anchor="end"))
    for power in range(math.ceil(low), math.floor(high) + 1):
        marks.append(text_mark(x(power), y.start + 18, f"{10.0**power:g}", anchor="middle"))
    for count, left, right in zip(result.counts, result.edges, result.edges[1:], strict=False):
        if count:
            wide = x(right) - x(left) - 1
            marks.append(box(x(left), y(count), wide, y.start - y(count), fill="var(--series)"))
    marks.append(text_mark(x.end, y.start + 36, "share of positions", anchor="end"))
    used = sum(result.counts)
    alt = (
        f"Components of {name} by the share of positions at which they are active: {used:,} are "
        f"active, {result.never:,} never."
    )
    return drawing(marks, width=WIDTH, height=182, alt=alt, most=WIDTH * 1.2)


def heat_map(picture: Picture, *, alt: str, most: float, below: str = "", extra: str = "") -> str:
    """Draw a matrix at most `most` pixels wide; `below` and `extra` name its axes."""
    cells = picture.cells()
    rows, columns = len(cells), len(cells[0])
    side = most / max(rows, columns, 4)
    left, top = (22.0 if extra else 0.0), 0.0
    wide, high = side * columns, side * rows
    marks = [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" '
        f'style="fill:none;stroke:{LINE}"></rect>',
        f'<g transform="translate({left:.1f} {top:.1f}) scale({side:.4g})" '
        f'style="shape-rendering:crispEdges">{"".join(_paths(cells, picture))}</g>',
    ]
    height = high + (22 if below else 1)
    if below:
        marks.append(text_mark(left, high + 16, below))
    if extra:
        turned = f"transform:rotate(-90deg);transform-origin:14px {high:.0f}px"
        marks.append(text_mark(14, high, extra, more=turned))
    width = left + max(wide, 8.0 * len(below)) + 1
    return drawing(marks, width=width, height=height, alt=alt, most=width)


def _paths(cells: list[list[float]], picture: Picture) -> list[str]:
    """Return one path per tint; neighbours of one tint are one stroke."""
    strongest = max(abs(picture.low), abs(picture.high)) or 1.0
    strokes: dict[int, list[str]] = {}
    for y, row in enumerate(cells):
        tints = [round(TINTS * value / strongest) for value in row]
        start = 0
        for x in range(1, len(tints) + 1):
            if x == len(tints) or tints[x] != tints[start]:
                if tints[start]:
                    run = f"M{start} {y}h{x - start}v1H{start}z"
                    strokes.setdefault(tints[start], []).append(run)
                start = x
    return [
        f'<path d="{"".join(runs)}" style="fill:{POSITIVE if tint > 0 else NEGATIVE};'
        f'fill-opacity:{abs(tint) / TINTS:g}"></path>'
        for tint, runs in sorted(strokes.items())
    ]
