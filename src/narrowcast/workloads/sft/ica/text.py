"""Networks and ablations as text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from narrowcast.workloads.sft.ica.networks import FunctionalNetworks
from narrowcast.workloads.sft.ica.study.ablation import Ablation, Lesion, Level

if TYPE_CHECKING:
    from narrowcast.workloads.sft.ica.study.driving import Resampled

_OF_NUMBERS = frozenset("-–0123456789.,%e+")
MOST_LAYERS = 6


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned columns, numbers right-aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    right = numeric(rows)

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(cells).rstrip()

    return [line(head), *map(line, rows)]


def numeric(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column whether it has only numbers."""
    return [all(set(cell) <= _OF_NUMBERS for cell in column) for column in zip(*rows, strict=True)]


def network_rows(networks: FunctionalNetworks) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of components."""
    head = ["component", "channels", "explained", "negentropy", "stability", "largest layers"]
    rows = []
    for component in networks.components:
        score = networks.scores.get(component)
        known = ["–"] * 3
        if score is not None:
            known = [f"{score.explained:.2%}", f"{score.negentropy:.3g}", f"{score.stability:.2f}"]
        size = f"{networks.size(component):,}"
        rows.append([str(component), size, *known, _layers(networks, component)])
    return head, rows


def about(networks: FunctionalNetworks) -> list[str]:
    """Return the provenance and findings of networks as lines."""
    layout, known = networks.layout, networks.provenance
    depth = f" of {layout.depth}" if layout.depth not in (None, len(layout.layers)) else ""
    lines = [
        f"{len(networks.components)} networks in {len(layout.layers)}{depth} layers with "
        f"{layout.width:,} {layout.site} channels each"
    ]
    parts = {"model": known.model, "data": known.data, "selector": known.selector}
    parts |= {
        "signals": known.signals,
        "stored in": known.dtype,
        "seed": "" if known.seed is None else str(known.seed),
    }
    if listed := [f"{name} {value}" for name, value in parts.items() if value]:
        lines.append(", ".join(listed))
    return [*lines, *(f"note: {finding}" for finding in known.findings)]


def network_lines(networks: FunctionalNetworks) -> list[str]:
    """Return networks as lines for a terminal."""
    return [*about(networks), "", *table(*network_rows(networks))]


def ablation_rows(ablation: Ablation) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of ablations."""
    measured = ["channels", "loss", "accuracy"]
    head = ["ablated", *measured, "loss minus random [95 %]", "worse than", "p"]
    rows = [["none", *_level(0, ablation.whole), "–", "–", "–"]]
    for lesion in (ablation.lesion, *ablation.each):
        versus, count = lesion.equal, len(lesion.equal.masks)
        cells = [str(versus.difference), f"{count - versus.at_least} of {count}"]
        level = _level(lesion.channels, lesion.level)
        rows.append([named(lesion), *level, *cells, f"{versus.p:.3f}"])
    chance = {
        "random, same size": ablation.lesion.equal,
        f"random {ablation.share:.0%}": ablation.larger,
    }
    for label, versus in chance.items():
        accuracy = sum(level.accuracy for level in versus.masks) / len(versus.masks)
        mean = Level(loss=versus.mean_loss, accuracy=accuracy)
        rows.append([label, *_level(versus.channels, mean), "–", "–", "–"])
    return head, rows


def preserved_rows(ablation: Ablation) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of networks kept alone."""
    head = ["networks kept", "channels", "loss", "accuracy", "added loss [95 %]"]
    return head, [
        [str(each.components), *_level(each.channels, each.level), str(each.cost)]
        for each in ablation.preserve
    ]


def ablation_lines(ablation: Ablation) -> list[str]:
    """Return an ablation as lines for a terminal, the conclusion last."""
    head = (
        f"{ablation.documents} documents, {ablation.tokens:,} tokens predicted; losses in nats per "
        "token, random masks as a mean"
    )
    larger = (
        f"Against a random {ablation.share:.0%} of the channels of each layer, the loss differs by "
        f"{ablation.larger.difference} nats per token and is higher than with "
        f"{len(ablation.larger.masks) - ablation.larger.at_least} of {len(ablation.larger.masks)} "
        "random masks."
    )
    return [
        head,
        "",
        *table(*ablation_rows(ablation)),
        *_one_by_one(ablation),
        "",
        *table(*preserved_rows(ablation)),
        "",
        larger,
        ablation.verdict(),
    ]


def _one_by_one(ablation: Ablation) -> list[str]:
    """Return which single networks differ from random masks."""
    if not ablation.each:
        return []
    first = ablation.each[0].equal
    results = {
        answer: [str(each.components[0]) for each in ablation.each if each.equal.answer == answer]
        for answer in ("more", "less")
    }
    message = [
        f"component{'s' * (len(numbers) > 1)} {', '.join(numbers)} {answer} than random"
        for answer, numbers in results.items()
        if numbers
    ]
    needed = ""
    if len(first.masks) < first.fewest_masks:
        needed = f"; {first.tests} tests need {first.fewest_masks} random masks (--random)"
    said = ", ".join(message) or f"none differs significantly from random{needed}"
    return ["", f"Single networks, p corrected for {first.tests} tests: {said}."]


def driving_rows(driving: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of tokens that drive components."""
    head = ["component", "tokens, by activity against the mean", "strongest occurrence"]
    rows = []
    for each in driving:
        tokens = ", ".join(f"{quoted(t['text'])} {t['activity']:.1f}×" for t in each["tokens"])
        first = each["occurrences"][0] if each["occurrences"] else None
        rows.append([str(each["component"]), tokens, "" if first is None else in_context(first)])
    return head, rows


def in_context(occurrence: Mapping[str, Any]) -> str:
    """Return an occurrence on one line, its token in brackets."""
    parts = (occurrence["before"], f"[{occurrence['text']}]", occurrence["after"])
    return "".join(parts).replace("\n", "⏎").strip()


def quoted(text: str) -> str:
    """Return the text of a token with visible spaces."""
    return text.replace("\n", "⏎").replace(" ", "␣") or "∅"


def driving_lines(driving: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tokens that drive components as lines for a terminal."""
    lines = []
    for each, (component, tokens, _) in zip(driving, driving_rows(driving)[1], strict=True):
        lines += [f"component {component}: {tokens}"]
        lines += [f"    {o['activity']:.1f}×  {in_context(o)}" for o in each["occurrences"][:3]]
    return lines


def resampled_rows(resampled: "Sequence[Resampled]") -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of bootstrap stability."""
    from narrowcast.workloads.sft.ica.study.driving import FOUND

    head = ["component", "IoU", "5 % quantile", f"found again (IoU ≥ {FOUND})"]
    return head, [
        [str(each.component), f"{each.iou:.2f}", f"{each.low:.2f}", f"{each.recovered:.0%}"]
        for each in resampled
    ]


def named(lesion: Lesion) -> str:
    """Return the name of a lesion's components."""
    numbers = lesion.components
    if len(numbers) == 1:
        return f"component {numbers[0]}"
    return f"{len(numbers)} components"


def _level(channels: int, level: Level) -> list[str]:
    return [f"{channels:,}", f"{level.loss:.4f}", f"{level.accuracy:.1%}"]


def _layers(networks: FunctionalNetworks, component: int) -> str:
    sizes = {layer: len(matches) for layer, matches in networks.networks[component].items()}
    order = sorted(sizes, key=lambda layer: (-sizes[layer], layer))
    notice = [f"{layer} ({sizes[layer]})" for layer in order[:MOST_LAYERS]]
    more = f" and {len(order) - MOST_LAYERS} more" if len(order) > MOST_LAYERS else ""
    return ", ".join(notice) + more
