"""Networks and ablations as report sections and as a page, with SVG charts."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.runs import ReportSection
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
    legend,
    line,
    path,
    text_mark,
)
from narrowcast.runs.report_drawing import drawing as svg
from narrowcast.workloads.sft.ica import text
from narrowcast.workloads.sft.ica.networks import FunctionalNetworks
from narrowcast.workloads.sft.ica.networks_file import load_networks
from narrowcast.workloads.sft.ica.study.ablation import Ablation, Interval, load_ablation

if TYPE_CHECKING:  # a report of a run needs neither torch nor numpy
    from narrowcast.workloads.sft.ica.study.continual import Learned
    from narrowcast.workloads.sft.ica.study.driving import Resampled

STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --sunk: #f4f4f0; --ink: #1d2429;
  --quiet: #5b666e; --line: #b9bdbb; --grid: #ececea; --series: #1b5e8f; --group0: #1b5e8f;
  --group1: #b3500f; --group2: #1a6a45; --group3: #6a3f96; --group4: #a31f15; --group5: #7d5400;
  --group6: #96306f; --group7: #4a5760; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14181b; --sunk: #1b2024;
  --ink: #e7e9e8; --quiet: #a0abb2; --line: #4a555b; --grid: #262d31; --series: #7fbdea;
  --group0: #7fbdea; --group1: #f2a45f; --group2: #7dd3a5; --group3: #cbaaf0; --group4: #ff9d92;
  --group5: #eec166; --group6: #f0a3d0; --group7: #b5c0c7; } }
body { margin: 0 auto; padding: 2.5rem clamp(1rem, 4vw, 2.5rem) 3rem; max-width: 74rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 Inter, system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { font-size: 1.75rem; line-height: 1.25; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
h3 { font-size: .9375rem; margin: 1.5rem 0 .5rem; }
.note { color: var(--quiet); font-size: .875rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .25rem .875rem .25rem 0; text-align: left; border-bottom: 1px solid var(--grid); }
th { color: var(--quiet); font-weight: 500; } .number { text-align: right; }
.legend { display: flex; flex-wrap: wrap; gap: .375rem 1.5rem; padding: 0; list-style: none;
  font-size: .875rem; }
.swatch { display: inline-block; width: .75rem; height: .75rem; margin-right: .5rem;
  border-radius: .1875rem; vertical-align: -.0625rem; }
"""
WIDTH, MOST_PIXELS = 960, 1200
LEFT, RIGHT, TOP, BOTTOM = 112, 16, 8, 34
THINNEST = 1.4
"""Minimum width of a mark."""
MOST_CELLS = 24
"""Components up to which a matrix shows numbers."""
BAR_ROW = 34
NETWORKS, MASKED, ABLATION = "networks.json", "masked.json", "ablation.json"
"""Files in the run folder."""


def page(title: str, sections: list[ReportSection]) -> str:
    """Return a page without scripts or external files."""
    body = "\n".join(f"<h2>{escape(each.title)}</h2>\n{each.html}" for each in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} – narrowcast</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def channel_map(networks: FunctionalNetworks) -> str:
    """Draw the channels of each network by layer."""
    layout = networks.layout
    row = max(7.0, min(16.0, 480 / len(layout.layers)))
    height = row * len(layout.layers)
    x = Scale(0, layout.width, LEFT, WIDTH - RIGHT)
    mark = max(x(1) - x(0), THINNEST)
    rows = {layer: TOP + number * row for number, layer in enumerate(layout.layers)}
    marks = [box(LEFT, TOP, x.end - x.start, height, fill="var(--sunk)")]
    for number, component in enumerate(networks.components):
        # One path per network: thousands of boxes would take ten times the bytes.
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


def sizes_by_layer(networks: FunctionalNetworks) -> str:
    """Draw the number of channels per component and layer."""
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
    """Draw the added loss of each ablation with its interval, and random masks as dots."""
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
    # Networks have the colours of the channel map.
    fills = [QUIET, *(colour(number) for number in range(len(ablation.each)))]
    for number, lesion in enumerate(lesions):
        y = TOP + BAR_ROW * number
        marks.append(text_mark(LEFT - 8, y + 19, text.named(lesion), anchor="end"))
        marks += _bar(x, lesion.cost, y, fills[number])
        marks.append(_chance(x, chance[number], y + 23))
    last = bottom - BAR_ROW
    marks.append(text_mark(LEFT - 8, last + 19, f"random {ablation.share:.0%}", anchor="end"))
    marks.append(_chance(x, larger, last + 15))
    marks.append(text_mark(x.end, last + 64, "added loss, nats per token", anchor="end"))
    alt = f"Loss added to that of the full model. {ablation.verdict()}"
    return _drawing(marks, last + 70, alt)


def preserve_curve(ablation: Ablation) -> str:
    """Draw the loss with only the first networks kept."""
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
    """Draw numbers as shades, with labels if there is room."""
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


def networks_section(networks: FunctionalNetworks) -> ReportSection:
    """Return charts and a table of networks."""
    about, *notes = text.about(networks)
    colours = legend(
        (colour(number), f"component {component}, {networks.size(component):,}")
        for number, component in enumerate(networks.components)
    )
    parts = [f"<p>{escape(about)}.</p>", channel_map(networks), colours]
    parts += [_noted(note) for note in notes]
    parts.append(_table(*text.network_rows(networks)))
    parts += ["<h3>Channels per component and layer</h3>", sizes_by_layer(networks)]
    if len(networks.components) > 1:
        parts += ["<h3>Overlap of networks (IoU)</h3>", overlap(networks)]
    return ReportSection(title="Functional networks", html="\n".join(parts))


def driving_section(driving: Sequence[Mapping[str, Any]]) -> ReportSection:
    """Return the tokens that drive each component, with their contexts."""
    parts = [
        _noted(
            "The activity of a network at a token is the root mean square of its standardised "
            "channels. A token of 3× has three times the mean activity. ␣ is a space, ⏎ a line "
            "break."
        )
    ]
    for number, each in enumerate(driving):
        dot = f'<span class="swatch" style="background:{colour(number)}"></span>'
        parts.append(f"<h3>{dot}component {each['component']}</h3>")
        tokens = [
            [text.quoted(t["text"]), f"{t['times']:,}", f"{t['activity']:.2f}"]
            for t in each["tokens"]
        ]
        parts.append(_table(["token", "occurrences", "activity"], tokens))
        contexts = [[f"{o['activity']:.2f}", text.in_context(o)] for o in each["occurrences"]]
        parts.append(_table(["activity", "strongest occurrences, one per document"], contexts))
    return ReportSection(title="Tokens that drive each component", html="\n".join(parts))


def resampled_section(resampled: "Sequence[Resampled]") -> ReportSection:
    """Return the bootstrap stability of each component."""
    note = (
        "Documents are drawn with replacement and networks are found again. The IoU is that with "
        "the nearest network of each resample, as a mean."
    )
    html = f"{_noted(note)}{_table(*text.resampled_rows(resampled))}"
    return ReportSection(title="Stability over documents", html=html)


def continual_section(results: "Sequence[Learned]") -> ReportSection:
    """Return the table of methods, and the accuracies of each after each task."""
    from narrowcast.workloads.sft.ica.study.continual import mean_matrices, summary

    note = (
        "Average is the mean accuracy over all tasks at the end. Backward transfer is the mean "
        "change of a task since it was learned, and forgetting the mean loss from its best. Models "
        "are evaluated without masks."
    )
    parts = [_table(*summary(results)), _noted(note)]
    tasks = list(results[0].tasks)
    for method, matrix in mean_matrices(results).items():
        labels = ["before", *(f"after {task}" for task in tasks)]
        alt = f"Accuracy of {method} on each task (columns) before and after each task (rows)."
        parts += [
            f"<h3>{escape(method)}: accuracy on each task</h3>",
            _matrix(matrix, labels, tasks, most=1.0, alt=alt, form=".0%", widest=120),
        ]
    return ReportSection(title="Continual learning", html="\n".join(parts))


def ablation_section(ablation: Ablation) -> ReportSection:
    """Return charts and a table of an ablation."""
    parts = [
        f"<p>{escape(ablation.verdict())}</p>",
        ablation_bars(ablation),
        _noted(
            f"Bars show ablated networks with 95 % intervals over {ablation.documents} documents. "
            "Dots show random masks with the same number of channels per layer."
        ),
        _table(*text.ablation_rows(ablation)),
    ]
    if ablation.preserve:
        parts += ["<h3>Only the first networks kept</h3>", preserve_curve(ablation)]
        parts.append(_noted("The dashed line is the full model."))
    return ReportSection(title="Ablation of each network", html="\n".join(parts))


def masked_section(measured: Mapping[str, Any]) -> ReportSection:
    """Return metrics with and without masks."""
    names = [name for name in measured["masked"] if name in measured["lifted"]]
    rows = [
        [name, f"{float(measured['masked'][name]):.4f}", f"{float(measured['lifted'][name]):.4f}"]
        for name in names
    ]
    said = (
        f"The run was trained and evaluated with masks ({measured['mode']}). The saved model has "
        "no masks; its metrics are in the right column."
    )
    head = ["metric", "with masks", "without masks"]
    return ReportSection(
        title="Evaluation with and without masks", html=f"<p>{escape(said)}</p>{_table(head, rows)}"
    )


def _noted(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kinds = [' class="number"' if each else "" for each in text.numeric(rows)]

    def cells(row: Sequence[str], tag: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f"<{tag}{scope}{kind}>{escape(cell)}</{tag}>"
            for cell, kind in zip(row, kinds, strict=True)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def sections(folder: Path) -> list[ReportSection]:
    """Return the sections that the run folder has files for."""
    result = []
    if (folder / NETWORKS).exists():
        result.append(networks_section(load_networks(folder / NETWORKS)))
    if (folder / MASKED).exists():
        result.append(masked_section(json.loads((folder / MASKED).read_text(encoding="utf-8"))))
    if (folder / ABLATION).exists():
        result.append(ablation_section(load_ablation(folder / ABLATION)))
    return result
