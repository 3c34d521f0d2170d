"""Figures: precision-recall curves, scatter plots, tracks, mutagenesis and k-mer spectra."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from narrowcast.runs.report_drawing import (
    GRID,
    INK,
    LINE,
    QUIET,
    Scale,
    axes,
    box,
    colour,
    dots,
    drawing,
    legend,
    line,
    path,
    text_mark,
)

SQUARE = 460
"""Width of a square figure."""
WIDE = 960
"""Width of a figure along a sequence."""
LETTER_COLOURS: Mapping[str, str] = {
    "A": colour(2), "C": colour(0), "G": colour(5), "T": colour(4), "U": colour(4),
}  # fmt: skip
"""Green, blue, yellow and red: how sequencing traces have always been drawn."""


def precision_recall(curves: Mapping[str, Any], others: Mapping[str, Any] | None) -> str:
    """Draw one curve per class with its area; dashed lines show chance."""
    x, y = Scale(0, 1, 48, SQUARE - 12), Scale(0, 1, SQUARE - 120, 24)
    marks = axes(x, y, x_label="recall", y_label="precision")
    for location, curve in enumerate(curves.values()):
        at = y(float(curve["share"]))
        dashes = "stroke-dasharray:3 5;stroke-opacity:.7"
        marks.append(line(x.start, at, x.end, at, stroke=colour(location), more=dashes))
    for location, curve in enumerate(curves.values()):
        points = [(x(float(recall)), y(float(right))) for recall, right in curve["points"]]
        marks.append(path(points, stroke=colour(location)))
    areas = ", ".join(f"{name} {float(curve['area']):.3f}" for name, curve in curves.items())
    alt = f"Precision-recall curves with areas: {areas}."
    named = [
        (colour(position), f"{name} {float(curve['area']):.3f}")
        for position, (name, curve) in enumerate(curves.items())
    ]
    if others:
        named.append(
            (
                "transparent",
                f"{int(others['classes'])} other classes, mean {float(others['area']):.3f}",
            )
        )
    return drawing(marks, width=SQUARE, height=SQUARE - 76, alt=alt, most=SQUARE * 1.2) + legend(
        named
    )


def cloud(points: Sequence[tuple[float, float]], spearman: float | None) -> str:
    """Draw predicted against true values, with the identity line."""
    low, high = min(min(pair) for pair in points), max(max(pair) for pair in points)
    margin = (high - low) / 25
    x = Scale(low - margin, high + margin, 64, SQUARE - 12)
    y = Scale(low - margin, high + margin, SQUARE - 70, 24)
    marks = axes(x, y, x_label="true value", y_label="predicted")
    same = "stroke-dasharray:4 4"
    marks.append(line(x(low), y(low), x(high), y(high), stroke=QUIET, more=same))
    radius = 3 if len(points) < 500 else 2
    at = [(x(true), y(result)) for true, result in points]
    marks.append(dots(at, radius=radius, fill="var(--series)", opacity=0.55))
    said = "" if spearman is None else f"Spearman {spearman:.3f}"
    marks.append(text_mark(x.start + 10, y.end + 18, said, fill=INK, more="font-weight:600"))
    alt = f"Predicted against true values of {len(points):,} sequences. {said}"
    return drawing(marks, width=SQUARE, height=SQUARE - 26, alt=alt, most=SQUARE * 1.2)


def track(row: Mapping[str, Any], shades: Mapping[int, str], unit: str) -> str:
    """Draw the classes along one sequence: true classes above, predicted below."""
    length = sum(int(letters) for _, letters in row["truth"])
    x = Scale(0, length, 76, WIDE - 8)
    marks = []
    for at, (key, name) in enumerate((("truth", "true"), ("found", "predicted"))):
        top, start = 4 + 26 * at, 0
        marks.append(text_mark(68, top + 15, name, anchor="end"))
        for kind, letters in row[key]:
            end = start + int(letters)
            marks.append(box(x(start), top, x(end) - x(start), 22, fill=shades[int(kind)]))
            start = end
    for value, label in x.ticks():
        marks.append(line(x(value), 56, x(value), 60, stroke=LINE))
        marks.append(text_mark(x(value), 74, label, anchor="middle"))
    same = _agreement(row["truth"], row["found"])
    alt = f"Classes along {length:,} {unit}s, {same:.0%} predicted correctly."
    return drawing(marks, width=WIDE, height=80, alt=alt, most=2 * WIDE, least=WIDE / 2)


def _agreement(truth: Sequence[Sequence[int]], matches: Sequence[Sequence[int]]) -> float:
    """Return the share of letters that have the same class in both."""
    edges = [list(accumulate(int(letters) for _, letters in runs)) for runs in (truth, matches)]
    if edges[0][-1] != edges[1][-1]:
        raise ValueError("tracks of one sequence have different lengths")
    same = start = 0
    for end in sorted({*edges[0], *edges[1]}):
        one, two = truth[bisect_left(edges[0], end)][0], matches[bisect_left(edges[1], end)][0]
        same += (end - start) * (int(one) == int(two))
        start = end
    return same / max(1, start)


def salient(variant: Mapping[str, Any]) -> str:
    """Draw how much each letter around a variant adds to the score; the variant is marked."""
    before, after = str(variant["reference"]), str(variant["alternative"])
    adds = [float(value) for value in variant["adds"]]
    step, left, high = 20.0, 64.0, 56.0
    most = max((abs(value) for value in adds), default=0.0) or 1.0
    middle, width = 12 + high, left + step * len(adds) + 8
    deep = any(value < -0.05 * most for value in adds)
    bottom = middle + (high if deep else 0)
    marks = [line(left, middle, width - 8, middle, stroke=LINE)]
    for value in (most, *((-most,) if deep else ())):
        y = middle - value / most * high
        marks.append(line(left, y, width - 8, y, stroke=GRID))
        marks.append(text_mark(left - 8, y + 4, f"{value:+.2g}", anchor="end"))
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    for at in changed:
        marks.append(box(left + at * step, 4, step, bottom + 42, fill="var(--half-paper)"))
    for at, (old, new, value) in enumerate(zip(before, after, adds, strict=True)):
        x, share = left + at * step, abs(value) / most * high
        shade = LETTER_COLOURS.get(new, colour(7))
        top = middle - share if value > 0 else middle
        marks.append(box(x + 3, top, step - 6, share, fill=shade))
        style = "font-family:ui-monospace,monospace;font-weight:600;font-size:14px"
        marks.append(
            text_mark(x + step / 2, bottom + 20, new, anchor="middle", fill=shade, more=style)
        )
        if old != new:
            marks.append(text_mark(x + step / 2, bottom + 38, old, anchor="middle", more=style))
    strongest = max(range(len(adds)), key=lambda at: abs(adds[at]))
    alt = (
        f"Contribution of {len(adds)} letters around {variant['name']}. The largest is "
        f"{adds[strongest]:+.3g}, of {after[strongest]} at offset {strongest - changed[0]:+d}."
    )
    return drawing(
        marks, width=width, height=bottom + 46, alt=alt, most=width * 1.15, least=width * 0.7
    )


def spectrum(results: Mapping[str, Any]) -> str:
    """Draw k-mer frequencies: bars for held-out sequences, dots for generated ones."""
    kmers = [str(name) for name in results["kmers"]]
    held = [float(value) for value in results["held_out"]]
    written = [float(value) for value in results["written"]]
    order = sorted(range(len(kmers)), key=lambda at: -held[at])
    x = Scale(0, len(kmers), 52, WIDE - 8)
    y = Scale(0, max(*held, *written, 1e-9), 212, 28)
    marks = []
    for value, _ in y.ticks():
        marks.append(line(x.start, y(value), x.end, y(value)))
        marks.append(text_mark(x.start - 8, y(value) + 4, f"{value:.1%}", anchor="end"))
    wide = x(1) - x(0)
    for location, at in enumerate(order):
        tall = y.start - y(held[at])
        marks.append(box(x(location) + 1, y(held[at]), wide - 2, tall, fill="var(--faint)"))
        middle = x(location) + wide / 2 + 3.5
        turned = f"transform:rotate(-90deg);transform-origin:{middle:.1f}px {y.start + 8:.0f}px"
        style = f"font-family:ui-monospace,monospace;font-size:10px;{turned}"
        if len(kmers[at]) == 1:
            style, middle = "font-family:ui-monospace,monospace", x(location) + wide / 2
            marks.append(text_mark(middle, y.start + 16, kmers[at], anchor="middle", more=style))
        else:
            marks.append(text_mark(middle, y.start + 8, kmers[at], anchor="end", more=style))
    centres = [(x(position) + wide / 2, y(written[at])) for position, at in enumerate(order)]
    marks.append(dots(centres, radius=3.5, fill="var(--evaluated)", opacity=1))
    agree = correlation(held, written)
    alt = (
        f"Frequencies of {len(kmers)} {results['k']}-mers, held out and generated; "
        f"correlation {agree:.3f}."
    )
    return drawing(
        marks, width=WIDE, height=244, alt=alt, most=2 * WIDE, least=WIDE * 0.8
    ) + legend([("var(--faint)", "held out"), ("var(--evaluated)", "generated")])


def correlation(one: Sequence[float], two: Sequence[float]) -> float:
    """Return Pearson's correlation, or 0 if either side is constant."""
    means = sum(one) / len(one), sum(two) / len(two)
    a, b = [value - means[0] for value in one], [value - means[1] for value in two]
    both = math.sqrt(sum(v * v for v in a) * sum(v * v for v in b))
    return sum(v * w for v, w in zip(a, b, strict=True)) / both if both else 0.0
