"""SVG drawings in the colours of the page around them, each with a text that describes it."""

import math
from collections.abc import Iterable
from html import escape

COLOURS = 8
"""Number of group colours of the page; they repeat after that."""
INK, QUIET, GRID, LINE = "var(--ink)", "var(--quiet)", "var(--grid)", "var(--line)"


def colour(location: int) -> str:
    """Return a group colour."""
    return f"var(--group{location % COLOURS})"


def drawing(
    marks: Iterable[str], *, width: float, height: float, alt: str, most: float, least: float = 0
) -> str:
    """Return a scrollable SVG as wide as the page, between `least` and `most` pixels."""
    return (
        f'<div class="scroll"><svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(alt)}" style="width:100%;min-width:{least:.0f}px;'
        f'max-width:{most:.0f}px;height:auto;display:block;font-size:12px">'
        f"{''.join(marks)}</svg></div>"
    )


def text_mark(
    x: float,
    y: float,
    said: str,
    *,
    anchor: str = "start",
    fill: str = QUIET,
    more: str = "",
) -> str:
    """Draw text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{fill};{more}">'
        f"{escape(said)}</text>"
    )


def box(x: float, y: float, width: float, height: float, *, fill: str, opacity: float = 1) -> str:
    """Draw a filled box."""
    seen = f";fill-opacity:{opacity:g}" if opacity != 1 else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
        f'height="{max(height, 0):.1f}" style="fill:{fill}{seen}"></rect>'
    )


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = GRID, more: str = "") -> str:
    """Draw a line."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'style="stroke:{stroke};{more}"></line>'
    )


def path(points: Iterable[tuple[float, float]], *, stroke: str, wide: float = 2) -> str:
    """Draw a line through points."""
    through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{through}" style="fill:none;stroke:{stroke};stroke-width:{wide:g};'
        'stroke-linejoin:round"></polyline>'
    )


def dots(points: Iterable[tuple[float, float]], *, radius: float, fill: str, opacity: float) -> str:
    """Draw a dot at each point."""
    each = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"></circle>' for x, y in points)
    return f'<g style="fill:{fill};fill-opacity:{opacity:g}">{each}</g>'


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return a legend of colours and labels."""
    return (
        '<ul class="legend">'
        + "".join(
            f'<li><span class="swatch" style="background:{shade}"></span>{escape(said)}</li>'
            for shade, said in items
        )
        + "</ul>"
    )


class Scale:
    """Maps numbers from `low` to `high` to positions from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if not high > low:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Return about five round numbers, with as many digits as they need."""
        span = self.high - self.low
        step = 10 ** math.floor(math.log10(span / 5))
        step *= next((factor for factor in (1, 2, 5) if span / (step * factor) <= 6), 10)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(n * step, f"{n * step:,.{digits}f}") for n in range(first, last + 1)]


def axes(x: Scale, y: Scale, *, x_label: str, y_label: str) -> list[str]:
    """Draw a grid with ticks and axis labels."""
    marks = []
    for value, label in y.ticks():
        marks.append(line(x.start, y(value), x.end, y(value)))
        marks.append(text_mark(x.start - 8, y(value) + 4, label, anchor="end"))
    for value, label in x.ticks():
        marks.append(line(x(value), y.start, x(value), y.end))
        marks.append(text_mark(x(value), y.start + 18, label, anchor="middle"))
    marks.append(text_mark(x.end, y.start + 36, x_label, anchor="end"))
    marks.append(text_mark(x.start - 36, y.end - 10, y_label))
    return marks
