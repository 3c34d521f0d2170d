"""The sections of a decomposition report, drawn from `decomposition.json` and the records."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from narrowcast.runs import Record, ReportSection
from narrowcast.runs.report_drawing import legend
from narrowcast.workloads.decompose.report import curves
from narrowcast.workloads.decompose.report.curves import NEGATIVE, POSITIVE, heat_map
from narrowcast.workloads.decompose.report.matrices import Picture
from narrowcast.workloads.decompose.report.schema import (
    FILE,
    MOST_COMPARED,
    Component,
    Decomposition,
    Site,
    read,
)

MOST_MAPS, MOST_DENSITIES = 12, 24
"""Sites whose importances, or densities, are drawn."""
MOST_VERDICTS = 32
MOST_SEEDS_SHOWN = 32
HIGH, LOW = 0.9, 0.1
"""An importance is said to be there, or not, beyond these."""


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections that the run folder has data for; an unreadable file becomes text."""
    charts = curves.trajectories(records)
    courses = []
    if charts:
        drawn = _side_by_side(
            [(message.title, curves.trajectory_chart(message)) for message in charts]
        )
        courses = [ReportSection(title="Metrics during training", html=drawn)]
    try:
        result = read(folder)
    except FileNotFoundError:  # the run has not ended
        return courses
    except (OSError, ValueError, RecursionError) as error:
        said = f"{FILE} cannot be read: {str(error).splitlines()[0]}"
        return [ReportSection(title="Results", html=f"<p>{escape(said)}</p>"), *courses]
    own = [
        ReportSection(title=title, html=html)
        for title, draw in DRAWN.items()
        if (html := draw(result))
    ]
    return [*own, *courses]


def _result_text(matched: Decomposition) -> str:
    said = []
    for verdict in matched.verdicts[:MOST_VERDICTS]:
        kind = "fair" if verdict.right is None else "good" if verdict.right else "bad"
        name = f"seed {verdict.seed}: " if len(matched.seeds) > 1 else ""
        said.append(f'<li class="{kind}">{escape(name + verdict.said)}</li>')
    judged = [verdict.right for verdict in matched.verdicts if verdict.right is not None]
    lead = escape(matched.target)
    if len(judged) > 1:
        lead += f": {sum(judged)} of {len(judged)} seeds match the ground truth."
    parts = [f'<p class="lead">{lead}</p>']
    if said:
        parts.append(f'<ul class="notices">{"".join(said)}</ul>')
    parts.append(_cut(len(matched.verdicts), MOST_VERDICTS, "seeds"))
    parts.append(sites_table(matched))
    if len(matched.seeds) > 1:
        each = "".join(
            f"<h3>{escape(site.name)}</h3>{seeds_table(matched, site)}"
            for site in matched.sites[:MOST_MAPS]
        )
        parts.append(f"<details><summary>Per seed</summary>{each}</details>")
    note = f"A component is active if its importance is above {matched.alive_threshold:g}. "
    if len(matched.seeds) > 1:
        note += f"Ranges are the minimum to the maximum over {len(matched.seeds)} seeds. "
    note += "L0 is the mean number of active components per position."
    if any(site.expected is not None for site in matched.sites):
        note += " If a number is expected, alive counts components that a single feature activates."
    return "".join(parts) + _noted(note)


def _importances(result: Decomposition) -> str:
    drawn = [site for site in result.sites if site.importance is not None]
    figures = [
        (site.name, _importance(site, site.importance))
        for site in drawn[:MOST_MAPS]
        if site.importance is not None
    ]
    if not figures:
        return ""
    probe = f" Rows: {result.probe}." if result.probe else ""
    note = (
        f"Seed {result.drawn_seed}.{probe} Columns: components, ordered by the row in which they "
        "are most important. The darkest shade is an importance of 1."
    )
    if any(site.shape == "dense" for site in drawn):
        note += " Components that all features share are ordered by their sum."
    return _side_by_side(figures) + _cut(len(drawn), MOST_MAPS, "sites") + _noted(note)


def _importance(site: Site, picture: Picture) -> str:
    cells = picture.cells()
    columns = len(cells[0])
    met = sum(max(row) > HIGH for row in cells)
    idle = sum(max(column) < LOW for column in zip(*cells, strict=True))
    alt = (
        f"Importances in {site.name}: {met} of {len(cells)} rows have a component above {HIGH}; "
        f"{idle} of {columns} columns stay below {LOW}."
    )
    below = (
        f"{columns} components"
        if columns == site.components
        else f"the first {columns} of {site.components:,} components"
    )
    if picture.shape[0] > len(cells):
        below += f"; {picture.shape[0]:,} rows pooled to {len(cells)}"
    return heat_map(picture, alt=alt, most=420, below=below, extra=f"{picture.shape[0]:,} rows")


def _components(result: Decomposition) -> str:
    drawn = [site for site in result.sites if site.largest]
    parts = []
    for site in drawn[:MOST_COMPARED]:
        figures = "".join(_component(site, each) for each in site.largest)
        parts.append(
            f"<h3>{escape(site.name)}, {site.inputs:,} → {site.outputs:,}</h3>"
            f'<div style="display:flex;flex-wrap:wrap;gap:1rem 2.5rem">{figures}</div>'
        )
    if not parts:
        return ""
    known = any(each.truth is not None for site in drawn for each in site.largest)
    note = (
        f"The largest alive components of seed {result.drawn_seed}, as matrices of outputs by "
        "inputs" + (": ground truth on the left, learned on the right." if known else ".")
    )
    shades = legend([(POSITIVE, "positive"), (NEGATIVE, "negative")])
    pooled = any(each.learned.pooled for site in drawn for each in site.largest)
    if pooled:
        note += " Large matrices are pooled by largest magnitude."
    return shades + "".join(parts) + _cut(len(result.sites), MOST_COMPARED, "sites") + _noted(note)


def _component(site: Site, each: Component) -> str:
    caption = f"{each.name}: component {each.number}" if each.name else f"component {each.number}"
    numbers = [
        f"cosine {each.cosine:.4f}" if each.cosine is not None else "",
        f"norm {each.norm_ratio:.3f} ×" if each.norm_ratio is not None else "",
        f"active {100 * each.density:.3g} %" if each.density is not None else "",
    ]
    notice = ", ".join(part for part in numbers if part)
    alt = f"{caption} of {site.name}. {notice}"
    pictures = [heat_map(each.learned, alt=alt, most=96)]
    if each.truth is not None:
        truth = f"Ground truth of {each.name or caption} in the target's {site.name}."
        pictures.insert(0, heat_map(each.truth, alt=truth, most=96))
    boxes = "".join(f'<div style="width:97px">{drawn}</div>' for drawn in pictures)
    return (
        '<figure style="margin:0">'
        f'<div style="display:flex;gap:.375rem;align-items:flex-start">{boxes}</div>'
        f'<figcaption class="note" style="display:block">{escape(caption)}<br>{escape(notice)}'
        "</figcaption></figure>"
    )


def _densities(result: Decomposition) -> str:
    drawn = [site for site in result.sites if site.densities is not None]
    figures = []
    for site in drawn[:MOST_DENSITIES]:
        if site.densities is not None:
            title = f"{site.name}: {site.densities.never:,} never active"
            figures.append((title, curves.density_chart(site.densities, site.name)))
    if not figures:
        return ""
    note = (
        f"Seed {result.drawn_seed}. Number of components by the share of positions at which they "
        "are active. The first bar includes all rarer ones."
    )
    return _side_by_side(figures) + _cut(len(drawn), MOST_DENSITIES, "sites") + _noted(note)


def _language(result: Decomposition) -> str:
    parts = []
    if result.language:
        parts.append(language_table(result))
        parts.append(
            _noted(
                "KL divergence is from the target's predictions. CE unrecovered is the CE "
                "difference as a share of the difference with zero masks."
            )
        )
    if result.pgd:
        rows = [[f"{steps:,}", f"{value:.4g}"] for steps, value in result.pgd]
        parts.append("<h3>Adversarial masks (PGD)</h3>" + table(["steps", "divergence"], rows))
        parts.append(
            _noted("Projected gradient ascent chooses the masks of unimportant components.")
        )
    return "".join(parts)


def _side_by_side(figures: Sequence[tuple[str, str]]) -> str:
    each = "".join(f"<div><h3>{escape(title)}</h3>{drawn}</div>" for title, drawn in figures)
    return f'<div class="pair">{each}</div>'


def _cut(there: int, shown: int, what: str) -> str:
    return _noted(f"Showing the first {shown} of {there:,} {what}.") if there > shown else ""


def _noted(said: str) -> str:
    return f'<p class="note">{escape(said)}</p>'


def sites_table(result: Decomposition) -> str:
    """Return a table with one row per site; several seeds are shown as a range."""
    columns: list[tuple[str, list[Sequence[float | None]], str]] = [
        ("alive", [site.alive for site in result.sites], "d"),
        ("expected", [_known(site.expected) for site in result.sites], "d"),
        ("L0", [site.l0 for site in result.sites], ".3g"),
        ("identity error", [site.identity_error for site in result.sites], "d"),
        ("min cosine", [site.cosine for site in result.sites], ".4f"),
        ("norm ratio", [site.norm_ratio for site in result.sites], ".3f"),
    ]
    lines = [column for column in columns if any(column[1])]
    rows = []
    for at, site in enumerate(result.sites):
        cells = [
            f"{site.inputs:,} → {site.outputs:,}",
            f"{site.components:,}",
            *(span(values[at], form) for _, values, form in lines),
        ]
        rows.append([site.name, *cells])
    return table(["site", "matrix", "components", *(name for name, _, _ in lines)], rows)


def _known(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def seeds_table(matched: Decomposition, site: Site) -> str:
    """Return a table of one site with one row per seed."""
    columns: list[tuple[str, Sequence[float | None], str]] = [
        ("alive", site.alive, "d"),
        ("L0", site.l0, ".3g"),
        ("identity error", site.identity_error, "d"),
        ("min cosine", site.cosine, ".4f"),
        ("norm ratio", site.norm_ratio, ".3f"),
    ]
    message = [column for column in columns if column[1]]
    rows = [
        [str(seed), *(number(values[at], form) for _, values, form in message)]
        for at, seed in enumerate(matched.seeds[:MOST_SEEDS_SHOWN])
    ]
    return table(["seed", *(name for name, _, _ in message)], rows)


def language_table(result: Decomposition) -> str:
    """Return the published table of decomposed language models: loss and KL by mask."""
    rows = [
        [
            row.mask,
            number(row.cross_entropy, ".3f"),
            number(row.kl, ".4f"),
            number(row.ce_difference, "+.3f"),
            number(row.ce_unrecovered, ".1%"),
        ]
        for row in result.language
    ]
    return table(["mask", "cross-entropy", "KL", "CE difference", "CE unrecovered"], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table whose first column names its rows."""
    first, *others = heads
    head = f'<th scope="col">{escape(first)}</th>' + "".join(
        f'<th scope="col" class="number" style="padding-left:1rem">{escape(name)}</th>'
        for name in others
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return (
        f'<div class="scroll"><table class="narrow"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def span(values: Sequence[float | None], form: str) -> str:
    """Return the minimum and maximum of what was measured, or one number if they are equal."""
    there = [value for value in values if value is not None]
    if not there:
        return ""
    if any(math.isnan(value) for value in there):
        return "nan"
    low, high = number(min(there), form), number(max(there), form)
    return low if low == high else f"{low} to {high}"


def number(value: float | None, form: str) -> str:
    """Format a number; None is empty."""
    if value is None:
        return ""
    return f"{value:,{form}}" if form == "d" else f"{value:{form}}"


DRAWN: Mapping[str, Callable[[Decomposition], str]] = {
    "Results": _result_text,
    "Loss by mask": _language,
    "Causal importances": _importances,
    "Largest components": _components,
    "Activation density of components": _densities,
}
"""The sections by title, each drawn if there is data for it."""
