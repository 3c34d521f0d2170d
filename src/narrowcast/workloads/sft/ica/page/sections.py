"""Report sections: functional networks and ablation results."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowcast.runs import ReportSection
from narrowcast.workloads.sft.ica.networks import FunctionalNetworks
from narrowcast.workloads.sft.ica.page import drawing, text
from narrowcast.workloads.sft.ica.study.ablation import Ablation


def networks_section(networks: FunctionalNetworks) -> ReportSection:
    """Draw networks: channel map, channels per layer, overlap."""
    about, *notes = text.about(networks)
    parts = [f"<p>{escape(about)}.</p>", drawing.channel_map(networks), drawing.legend(networks)]
    parts += [_noted(note) for note in notes]
    parts.append(_table(*text.network_rows(networks)))
    parts += ["<h3>Channels per component and layer</h3>", drawing.sizes_by_layer(networks)]
    if len(networks.components) > 1:
        parts += ["<h3>Overlap of networks (IoU)</h3>", drawing.overlap(networks)]
    return ReportSection(title="Functional networks", html="\n".join(parts))


def ablation_section(ablation: Ablation) -> ReportSection:
    """Draw the loss of ablated networks against random masks, and of networks kept alone."""
    parts = [
        f"<p>{escape(ablation.verdict())}</p>",
        drawing.ablation_bars(ablation),
        _noted(
            f"Bars show ablated networks with 95 % intervals over {ablation.documents} documents. "
            "Dots show random masks with the same number of channels per layer."
        ),
        _table(*text.ablation_rows(ablation)),
    ]
    if ablation.preserve:
        parts += ["<h3>Only the first networks kept</h3>", drawing.preserve_curve(ablation)]
        parts.append(_noted("The dashed line is the full model."))
    return ReportSection(title="Ablation of each network", html="\n".join(parts))


def masked_section(measured: Mapping[str, Any]) -> ReportSection:
    """Compare the model with the masks it was trained with and without them."""
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
