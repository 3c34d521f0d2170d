"""Heat maps of matrices, as SVG that knows light from dark: one path for each tint."""

from narrowcast.runs.report_drawing import LINE, drawing, text_mark
from narrowcast.workloads.decompose.report.matrices import Picture

TINTS = 10
"""Shades of a colour that are told apart; what is below half of the first is left blank."""
POSITIVE, NEGATIVE = "var(--series)", "var(--evaluated)"


def heat_map(picture: Picture, *, alt: str, most: float, below: str = "", extra: str = "") -> str:
    """Draw a matrix at most `most` pixels wide; `below` and `beside` name its axes."""
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
    """Return a path for each tint; neighbours of one tint are one stroke of it."""
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
