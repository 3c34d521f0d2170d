"""Networks and ablations as SVG, in the colours of the page."""

import math
from collections.abc import Iterable, Sequence

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
    line,
    path,
    text_mark,
)
from narrowcast.runs.report_drawing import drawing as svg
from narrowcast.runs.report_drawing import legend as svg_legend
from narrowcast.workloads.sft.ica.networks import FunctionalNetworks
from narrowcast.workloads.sft.ica.page.text import named
from narrowcast.workloads.sft.ica.study.ablation import Ablation, Interval

WIDTH, MOST_PIXELS = 960, 1200
LEFT, RIGHT, TOP, BOTTOM = 112, 16, 8, 34
THINNEST = 1.4
"""A mark that can be seen, in units of the drawing."""
MOST_CELLS = 24
"""Components up to which a matrix has numbers in its cells."""
BAR_ROW = 34


def channel_map(networks: FunctionalNetworks) -> str:
    """Draw which channels of which layers belong to which network."""
    layout = networks.layout
    row = max(7.0, min(16.0, 480 / len(layout.layers)))
    height = row * len(layout.layers)
    x = Scale(0, layout.width, LEFT, WIDTH - RIGHT)
    mark = max(x(1) - x(0), THINNEST)
    rows = {layer: TOP + number * row for number, layer in enumerate(layout.layers)}
    marks = [box(LEFT, TOP, x.end - x.start, height, fill="var(--sunk)")]
    for number, component in enumerate(networks.components):
        # One path for a network: thousands of boxes would take ten times the bytes.
        outline = "".join(
            f"M{x(channel):.1f} {rows[layer] + 0.5:.1f}h{mark:.1f}v{row - 1:.1f}h-{mark:.1f}z"
            for layer, channels in sorted(networks.networks[component].items())
            for channel in channels
        )
        marks.append(f'<path d="{outline}" style="fill:{colour(number)};fill-opacity:.8"></path>')
    every = max(1, math.ceil(14 / row))
    for layer in layout.layers[::every]:
        marks.append(text_mark(LEFT - 8, rows[layer] + row / 2 + 4, str(layer), anchor="end"))
    for value, label in x.ticks():
        marks.append(text_mark(x(value), TOP + height + 16, label, anchor="middle"))
    marks.append(text_mark(8, TOP + 12, "layer"))
    marks.append(text_mark(WIDTH - RIGHT, TOP + height + 30, "channel", anchor="end"))
    sizes = ", ".join(f"{c} has {networks.size(c):,}" for c in networks.components[:20])
    alt = f"Map of the channels of each network by layer; channel counts: component {sizes}."
    return _drawing(marks, height + TOP + BOTTOM, alt)


def legend(networks: FunctionalNetworks) -> str:
    """Name the colours of the map."""
    return svg_legend(
        (colour(number), f"component {component}, {networks.size(component):,}")
        for number, component in enumerate(networks.components)
    )


def sizes_by_layer(networks: FunctionalNetworks) -> str:
    """Draw how many channels of each layer each network has."""
    layers = networks.layout.layers
    counts = [
        [len(networks.networks[component].get(layer, ())) for layer in layers]
        for component in networks.components
    ]
    most = max((count for row in counts for count in row), default=0)
    busiest = [layers[max(range(len(layers)), key=row.__getitem__)] for row in counts]
    alt = "Channels per component and layer; " + ", ".join(
        f"component {c} has the most in layer {layer}"
        for c, layer in list(zip(networks.components, busiest, strict=True))[:20]
    )
    labels = [f"component {component}" for component in networks.components]
    columns = [str(layer) for layer in layers]
    return _matrix(counts, labels, columns, most=most, alt=f"{alt}.", form="d")


def overlap(networks: FunctionalNetworks) -> str:
    """Draw the IoU of every pair of networks."""
    numbers = networks.components
    shares = [[networks.iou(a, networks, b) for b in numbers] for a in numbers]
    pairs = [(shares[i][j], i, j) for i in range(len(numbers)) for j in range(i)]
    alt = "Overlap of networks as intersection over union"
    if pairs:
        share, i, j = max(pairs)
        alt += f"; the largest is {share:.2f}, of components {numbers[j]} and {numbers[i]}"
    labels = [str(number) for number in numbers]
    return _matrix(shares, labels, labels, most=1.0, alt=f"{alt}.", form=".2f", widest=48)


def ablation_bars(ablation: Ablation) -> str:
    """Draw the added loss of each ablation with its interval, and each random mask as a dot."""
    lesions = (ablation.lesion, *ablation.each)
    chance = [[mask.loss - ablation.whole.loss for mask in each.equal.masks] for each in lesions]
    larger = [mask.loss - ablation.whole.loss for mask in ablation.larger.masks]
    costs = [lesion.cost for lesion in lesions]
    low = min(0.0, *(cost.low for cost in costs), *(v for row in chance for v in row))
    high = max(1e-6, *(cost.high for cost in costs), *(v for row in chance for v in row), *larger)
    x = Scale(low, high, LEFT, WIDTH - RIGHT)
    bottom = TOP + BAR_ROW * (len(lesions) + 1)
    marks = []
    for value, label in x.ticks():
        marks.append(line(x(value), TOP, x(value), bottom, stroke=GRID if value else LINE))
        marks.append(text_mark(x(value), bottom + 16, label, anchor="middle"))
    # A network has the colour it has on the map; all together have one of their own.
    fills = [QUIET, *(colour(number) for number in range(len(ablation.each)))]
    for number, lesion in enumerate(lesions):
        y = TOP + BAR_ROW * number
        marks.append(text_mark(LEFT - 8, y + 19, named(lesion), anchor="end"))
        marks += _bar(x, lesion.cost, y, fills[number])
        marks.append(_chance(x, chance[number], y + 23))
    last = bottom - BAR_ROW
    marks.append(text_mark(LEFT - 8, last + 19, f"random {ablation.share:.0%}", anchor="end"))
    marks.append(_chance(x, larger, last + 15))
    marks.append(text_mark(x.end, last + 64, "added loss, nats per token", anchor="end"))
    alt = f"Loss added to that of the full model. {ablation.verdict()}"
    return _drawing(marks, last + 70, alt)


def preserve_curve(ablation: Ablation) -> str:
    """Draw the loss with only the first networks kept, by the number of their channels."""
    levels, whole = ablation.preserve, ablation.whole.loss
    losses = [whole, *(each.level.loss for each in levels)]
    x = Scale(0, max(each.channels for each in levels) or 1, LEFT, WIDTH - RIGHT)
    y = Scale(min(losses), max(losses), TOP + 236, TOP + 16)
    marks = axes(x, y, x_label="channels kept", y_label="loss")
    dashes = "stroke-dasharray:4 4"
    marks.append(line(x.start, y(whole), x.end, y(whole), stroke=QUIET, more=dashes))
    points = [(x(each.channels), y(each.level.loss)) for each in levels]
    marks.append(path(points, stroke=colour(0)))
    marks.append(dots(points, radius=4, fill=colour(0), opacity=1))
    first, last = levels[0], levels[-1]
    alt = (
        f"Loss with only the first networks kept: {first.level.loss:.3f} with {first.channels:,} "
        f"channels, {last.level.loss:.3f} with {last.channels:,}. The full model has {whole:.3f}."
    )
    return _drawing(marks, y.start + 44, alt)


def _bar(x: Scale, cost: Interval, y: float, fill: str) -> list[str]:
    """Draw a bar from zero, and its interval."""
    start, end = sorted((x(0), x(cost.value)))
    thick = "stroke-width:1.5"
    return [
        box(start, y + 4, max(end - start, 0.5), 14, fill=fill, opacity=0.75),
        line(x(cost.low), y + 11, x(cost.high), y + 11, stroke=INK, more=thick),
        *(line(x(v), y + 6, x(v), y + 16, stroke=INK, more=thick) for v in (cost.low, cost.high)),
    ]


def _chance(x: Scale, costs: Iterable[float], y: float) -> str:
    return dots([(x(cost), y) for cost in costs], radius=3, fill=QUIET, opacity=0.55)


def _matrix(
    cells: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    most: float,
    alt: str,
    form: str,
    widest: float = WIDTH,
) -> str:
    """Draw numbers as shades, with the numbers themselves if there is room."""
    width = min(widest, (WIDTH - LEFT - RIGHT) / len(columns))
    high = 24 if len(rows) <= MOST_CELLS else max(6.0, 576 / len(rows))
    written = high >= 20 and width >= 24
    marks = []
    for i, row in enumerate(cells):
        y = TOP + i * high
        if high >= 12 or i % 5 == 0:
            marks.append(text_mark(LEFT - 8, y + high / 2 + 4, rows[i], anchor="end"))
        for j, value in enumerate(row):
            x, share = LEFT + j * width, value / most if most else 0.0
            shade = round(0.04 + 0.86 * share, 2)
            marks.append(box(x, y, width - 1, high - 1, fill="var(--series)", opacity=shade))
            if written and value:
                ink = "var(--paper)" if share > 0.55 else INK
                at = x + width / 2, y + high / 2 + 4
                marks.append(text_mark(*at, f"{value:{form}}", anchor="middle", fill=ink))
    bottom = TOP + high * len(rows)
    every = max(1, math.ceil(26 / width))
    for j in range(0, len(columns), every):
        marks.append(text_mark(LEFT + (j + 0.5) * width, bottom + 15, columns[j], anchor="middle"))
    return _drawing(marks, bottom + 24, alt)


def _drawing(marks: Iterable[str], height: float, alt: str) -> str:
    return svg(marks, width=WIDTH, height=height, alt=alt, most=MOST_PIXELS)
