"""Sections of a report: networks drawn, and what an ablation found."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowcast.runs import ReportSection
from narrowcast.workloads.sft.ica.networks import FunctionalNetworks
from narrowcast.workloads.sft.ica.page import drawing, text
from narrowcast.workloads.sft.ica.study.ablation import Ablation


def networks_section(networks: FunctionalNetworks) -> ReportSection:
    """Draw networks: a map of channels, sizes by layer, overlap."""
    about, *notes = text.about(networks)
    parts = [f"<p>{escape(about)}.</p>", drawing.channel_map(networks), drawing.legend(networks)]
    parts += [_noted(note) for note in notes]
    parts.append(_table(*text.network_rows(networks)))
    parts += ["<h3>Channels by component and layer</h3>", drawing.sizes_by_layer(networks)]
    if len(networks.components) > 1:
        parts += ["<h3>Overlap of networks, as IoU</h3>", drawing.overlap(networks)]
    return ReportSection(title="Functional networks", html="\n".join(parts))


def ablation_section(ablation: Ablation) -> ReportSection:
    """Draw what networks cost, beside chance, and what they keep alive."""
    parts = [
        f"<p>{escape(ablation.verdict())}</p>",
        drawing.ablation_bars(ablation),
        _noted(
            f"Bars are networks silenced, with 95 % intervals over {ablation.documents} documents; "
            "dots below are random masks of as many channels in each layer."
        ),
        _table(*text.ablation_rows(ablation)),
    ]
    if ablation.preserve:
        parts += ["<h3>The first networks alone</h3>", drawing.preserve_curve(ablation)]
        parts.append(_noted("The dashed line is the whole model."))
    return ReportSection(title="What the networks are worth", html="\n".join(parts))


def masked_section(measured: Mapping[str, Any]) -> ReportSection:
    """Say how the model does with its masks, which it was trained with, and without."""
    names = [name for name in measured["masked"] if name in measured["lifted"]]
    rows = [
        [name, f"{float(measured['masked'][name]):.4f}", f"{float(measured['lifted'][name]):.4f}"]
        for name in names
    ]
    said = (
        f"The run was trained and judged with masks ({measured['mode']}). What is saved has none: "
        "the right column is that model."
    )
    head = ["measure", "with masks", "masks lifted"]
    return ReportSection(
        title="With masks and without", html=f"<p>{escape(said)}</p>{_table(head, rows)}"
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
