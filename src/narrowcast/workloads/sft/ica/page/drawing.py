"""Networks and ablations drawn in SVG, in the colours of the page around them.

Colours are custom properties (`--group0`, `--quiet`), which the report and our own page set for
light and dark. Every drawing says in words what it shows.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

from narrowcast.workloads.sft.ica.networks import FunctionalNetworks
from narrowcast.workloads.sft.ica.page.text import named
from narrowcast.workloads.sft.ica.study.ablation import Ablation, Interval

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 112, 16, 8, 34
COLOURS = 8
"""Those of the page; after them they begin again."""
THINNEST = 1.4
"""A mark that can be seen, in units of the drawing."""
MOST_CELLS = 24
"""Components up to which a matrix has numbers in its cells."""


def colour(place: int) -> str:
    """Return the colour of one of many."""
    return f"var(--group{place % COLOURS})"


def channel_map(networks: FunctionalNetworks) -> str:
    """Draw which channels of which layers belong to which network."""
    layout = networks.layout
    row = max(7.0, min(16.0, 480 / len(layout.layers)))
    height = row * len(layout.layers)
    inner = WIDTH - LEFT - RIGHT
    step = inner / layout.width
    mark = max(step, THINNEST)
    places = {layer: i for i, layer in enumerate(layout.layers)}
    marks = [_box(LEFT, TOP, inner, height, fill="var(--sunk)")]
    for number, component in enumerate(networks.components):
        path = "".join(
            f"M{LEFT + channel * step:.1f} {TOP + places[layer] * row + 0.5:.1f}"
            f"h{mark:.1f}v{row - 1:.1f}h-{mark:.1f}z"
            for layer, channels in sorted(networks.networks[component].items())
            for channel in channels
        )
        marks.append(f'<path d="{path}" style="fill:{colour(number)};fill-opacity:.8"/>')
    every = max(1, math.ceil(14 / row))
    for layer, place in places.items():
        if place % every == 0:
            marks.append(_text(LEFT - 8, TOP + (place + 0.5) * row + 4, str(layer), "end"))
    for tick in _ticks(0, layout.width):
        marks.append(_text(LEFT + tick * step, TOP + height + 16, f"{tick:,.0f}", "middle"))
    marks.append(_text(8, TOP + 12, "layer", "start"))
    marks.append(_text(WIDTH - RIGHT, TOP + height + 30, "channel", "end"))
    sizes = ", ".join(f"{c} has {networks.size(c):,}" for c in networks.components[:20])
    alt = f"Channels of each network by layer and channel; component {sizes}."
    return _drawing(marks, height + TOP + BOTTOM, alt)


def legend(networks: FunctionalNetworks) -> str:
    """Name the colours of the map."""
    items = "".join(
        f'<span style="margin-right:1rem;white-space:nowrap"><span style="display:inline-block;'
        f"width:.75rem;height:.75rem;border-radius:.1875rem;margin-right:.375rem;background:"
        f'{colour(place)}"></span>component {component}, {networks.size(component):,}</span>'
        for place, component in enumerate(networks.components)
    )
    return f'<p class="note">{items}</p>'


def sizes_by_layer(networks: FunctionalNetworks) -> str:
    """Draw how many channels of each layer each network has."""
    layers = networks.layout.layers
    counts = [
        [len(networks.networks[component].get(layer, ())) for layer in layers]
        for component in networks.components
    ]
    most = max((count for row in counts for count in row), default=0)
    busiest = [layers[max(range(len(layers)), key=row.__getitem__)] for row in counts]
    alt = "Channels by component and layer; " + ", ".join(
        f"component {c} has most in layer {layer}"
        for c, layer in list(zip(networks.components, busiest, strict=True))[:20]
    )
    labels = [f"component {component}" for component in networks.components]
    return _matrix(
        counts, labels, [str(layer) for layer in layers], most=most, alt=f"{alt}.", form="d"
    )


def overlap(networks: FunctionalNetworks) -> str:
    """Draw how much any two networks share, as IoU."""
    numbers = networks.components
    shares = [[networks.iou(a, networks, b) for b in numbers] for a in numbers]
    pairs = [(shares[i][j], i, j) for i in range(len(numbers)) for j in range(i)]
    alt = "Overlap of networks as intersection over union"
    if pairs:
        share, i, j = max(pairs)
        alt += f"; the largest is {share:.2f}, of components {numbers[j]} and {numbers[i]}"
    labels = [str(number) for number in numbers]
    return _matrix(shares, labels, labels, most=1.0, alt=f"{alt}.", form=".2f", narrow=True)


def ablation_bars(ablation: Ablation) -> str:
    """Draw what each lesion costs, with its interval, and each random mask as a dot."""
    whole = ablation.whole.loss
    rows = [
        (named(lesion), lesion.cost, lesion.equal) for lesion in (ablation.lesion, *ablation.each)
    ]
    beyond = [row[1].high for row in rows] + [
        mask.loss - whole for row in [*rows, ("", None, ablation.larger)] for mask in row[2].masks
    ]
    below = [row[1].low for row in rows] + [
        mask.loss - whole for row in rows for mask in row[2].masks
    ]
    low, high = min(0.0, *below), max(1e-6, *beyond)
    scale = _Scale(low, high)
    # A network has the colour it has on the map; all together have one of their own.
    fills = ["var(--quiet)", *(colour(place) for place in range(len(ablation.each)))]
    marks, y = [_grid(scale, len(rows) + 1)], TOP
    for place, (label, cost, versus) in enumerate(rows):
        marks += [_text(LEFT - 8, y + 19, label, "end"), _bar(scale, cost, y, fills[place])]
        marks += _dots(scale, (mask.loss - whole for mask in versus.masks), y + 23)
        y += 34
    marks.append(_text(LEFT - 8, y + 19, f"{ablation.share:.0%} at random", "end"))
    marks += _dots(scale, (mask.loss - whole for mask in ablation.larger.masks), y + 15)
    marks.append(_text(WIDTH - RIGHT, y + 64, "nats a token above the whole model", "end"))
    alt = f"Loss above that of the whole model. {ablation.verdict()}"
    return _drawing(marks, y + 70, alt)


def preserve_curve(ablation: Ablation) -> str:
    """Draw the loss with the first networks alone, over how many channels they have."""
    kept, height = ablation.preserve, 220
    lows = [ablation.whole.loss, *(each.level.loss for each in kept)]
    bottom, top = min(lows), max(lows)
    most = max(each.channels for each in kept) or 1
    span = (top - bottom) or 1.0

    def x(channels: float) -> float:
        return LEFT + channels / most * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + 8 + (top - loss) / span * height

    marks = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" '
        f'style="stroke:var(--grid)"></line>' + _text(LEFT - 8, y(tick) + 4, label, "end")
        for tick, label in _labelled(bottom, top)
    ]
    marks += [_text(x(t), TOP + height + 30, f"{t:,.0f}", "middle") for t in _ticks(0, most)]
    line = y(ablation.whole.loss)
    marks.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{line:.1f}" y2="{line:.1f}" '
        'style="stroke:var(--quiet);stroke-dasharray:4 4"></line>'
    )
    points = " ".join(f"{x(each.channels):.1f},{y(each.level.loss):.1f}" for each in kept)
    marks.append(
        f'<polyline points="{points}" style="fill:none;stroke:{colour(0)};stroke-width:2"/>'
    )
    for each in kept:
        where = f'cx="{x(each.channels):.1f}" cy="{y(each.level.loss):.1f}"'
        marks.append(f'<circle {where} r="4" style="fill:{colour(0)}"/>')
    marks.append(_text(WIDTH - RIGHT, TOP + height + 46, "channels kept", "end"))
    alt = (
        f"Loss with the first networks alone: {kept[0].level.loss:.3f} with {kept[0].channels:,} "
        f"channels, {kept[-1].level.loss:.3f} with {kept[-1].channels:,}; the whole model has "
        f"{ablation.whole.loss:.3f}."
    )
    return _drawing(marks, height + 62, alt)


class _Scale:
    """Where numbers stand from left to right."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return LEFT + min(max(share, 0), 1) * (WIDTH - LEFT - RIGHT)


def _bar(scale: _Scale, cost: Interval, y: float, fill: str) -> str:
    start, end = sorted((scale(0), scale(cost.value)))
    low, high, middle = scale(cost.low), scale(cost.high), y + 11
    return (
        f'<g><rect x="{start:.1f}" y="{y + 4}" '
        f'width="{max(end - start, 0.5):.1f}" height="14" style="fill:{fill};fill-opacity:.75"/>'
        f'<path d="M{low:.1f} {middle - 5}v10M{low:.1f} {middle}H{high:.1f}M{high:.1f} '
        f'{middle - 5}v10" style="stroke:var(--ink);stroke-width:1.5;fill:none"/></g>'
    )


def _dots(scale: _Scale, values: Iterable[float], y: float) -> list[str]:
    return [
        f'<circle cx="{scale(value):.1f}" cy="{y}" r="3" style="fill:var(--quiet);'
        f'fill-opacity:.55"/>'
        for value in values
    ]


def _grid(scale: _Scale, rows: int) -> str:
    bottom = TOP + 34 * rows
    return "".join(
        f'<line x1="{scale(tick):.1f}" x2="{scale(tick):.1f}" y1="{TOP}" y2="{bottom}" '
        f'style="stroke:var({"--line" if tick == 0 else "--grid"})"></line>'
        + _text(scale(tick), bottom + 16, label, "middle")
        for tick, label in _labelled(scale.low, scale.high)
    )


def _matrix(
    cells: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    most: float,
    alt: str,
    form: str,
    narrow: bool = False,
) -> str:
    """Draw numbers as shades, with the numbers themselves where there is room."""
    width = min(48.0, (WIDTH - LEFT - RIGHT) / len(columns)) if narrow else None
    width = width or (WIDTH - LEFT - RIGHT) / len(columns)
    high = 24 if len(rows) <= MOST_CELLS else max(6.0, 576 / len(rows))
    written = high >= 20 and width >= 24
    marks = []
    for i, row in enumerate(cells):
        y = TOP + i * high
        if high >= 12 or i % 5 == 0:
            marks.append(_text(LEFT - 8, y + high / 2 + 4, rows[i], "end"))
        for j, value in enumerate(row):
            x, share = LEFT + j * width, value / most if most else 0.0
            fill = f"fill:var(--series);fill-opacity:{0.04 + 0.86 * share:.2f}"
            marks.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{high - 1:.1f}" '
                f'style="{fill}"/>'
            )
            if written and value:
                ink = "var(--paper)" if share > 0.55 else "var(--ink)"
                marks.append(
                    _text(x + width / 2, y + high / 2 + 4, f"{value:{form}}", "middle", ink)
                )
    bottom = TOP + high * len(rows)
    every = max(1, math.ceil(26 / width))
    marks += [
        _text(LEFT + (j + 0.5) * width, bottom + 15, label, "middle")
        for j, label in enumerate(columns)
        if j % every == 0
    ]
    return _drawing(marks, bottom + 24, alt)


def _drawing(marks: Iterable[str], height: float, alt: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(alt)}" '
        'style="width:100%;height:auto;display:block;font-size:12px">' + "".join(marks) + "</svg>"
    )


def _box(x: float, y: float, width: float, height: float, *, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height:.1f}" style="fill:{fill}"/>'


def _text(x: float, y: float, text: str, anchor: str, fill: str = "var(--quiet)") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{fill}">'
        f"{escape(text)}</text>"
    )


def _labelled(low: float, high: float) -> list[tuple[float, str]]:
    """Return round numbers, each with as many digits as it takes to tell them apart."""
    ticks = _ticks(low, high)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(tick, f"{tick:,.{digits}f}") for tick in ticks]


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high, about five."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]
