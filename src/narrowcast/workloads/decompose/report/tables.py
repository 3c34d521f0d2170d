"""Tables of a decomposition: sites over all seeds, sites per seed, and loss by mask."""

import math
from collections.abc import Sequence
from html import escape

from narrowcast.workloads.decompose.report.schema import Decomposition, Site

MOST_SEEDS_SHOWN = 32


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
    """Return the least and the most of what was measured, or one number where they are the same."""
    there = [value for value in values if value is not None]
    if not there:
        return ""
    if any(math.isnan(value) for value in there):
        return "nan"
    low, high = number(min(there), form), number(max(there), form)
    return low if low == high else f"{low} to {high}"


def number(value: float | None, form: str) -> str:
    """Return a number in a form; nothing where there is none."""
    if value is None:
        return ""
    return f"{value:,{form}}" if form == "d" else f"{value:{form}}"
