"""Tables: metrics per set, and the confusion matrix."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowcast.runs import TaskInfo
from narrowcast.runs.strict_json import NONFINITE

MOST_TINT = 45
"""Per cent of a colour below words: the words stay readable on it, in light and dark."""
LONGEST_NAME = 32
"""Letters of a class in a table."""


def measures(sets: Mapping[str, Mapping[str, Any]], info: TaskInfo) -> str:
    """Return a table of metrics, one column per set, in the order of the task."""
    known = {metric.name: metric for metric in info.metrics}
    matches = {name for message in sets.values() for name in message["measured"]}
    names = [name for name in known if name in matches] + sorted(matches - set(known))
    rows = []
    for name in names:
        cells = []
        for notice in sets.values():
            value = notice["measured"].get(name)
            number = None if value is None else _number(value)
            text = (
                ""
                if number is None
                else _written(number, known[name].text if name in known else "")
            )
            cells.append(f'<td class="number">{escape(text)}</td>')
        rows.append(f'<tr><th scope="row">{escape(_spoken(name))}</th>{"".join(cells)}</tr>')
    heads = "".join(
        f'<th scope="col" class="number">{escape(name)}, {_count(counts)}</th>'
        for name, counts in sets.items()
    )
    return (
        f'<div class="scroll"><table class="narrow"><thead><tr><th scope="col">metric</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _count(info: Mapping[str, Any]) -> str:
    rows = int(info["rows"])
    return f"{rows:,} row{'' if rows == 1 else 's'}"


def _spoken(name: str) -> str:
    if name in ("mcc", "f1", "auroc", "auprc", "rmse"):
        return name.upper()
    return name.capitalize() if name in ("spearman", "pearson") else name.replace("_", " ")


def _number(value: Any) -> float:
    return NONFINITE[value] if isinstance(value, str) else float(value)


def _written(value: float, form: str) -> str:
    return f"{value:{form or '.4f'}}" if math.isfinite(value) else f"{value}"


def confusion(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Return the confusion matrix; a cell is as dark as its share of the row."""
    rows = []
    for at, row in enumerate(counts):
        total = sum(int(count) for count in row)
        cells = [_cell(int(count), total, right=at == there) for there, count in enumerate(row)]
        rows.append(
            f'<tr><th scope="row" style="white-space:nowrap">{_short(classes[at])}</th>'
            f"{''.join(cells)}"
            f'<td class="number quiet" style="padding-left:.75rem">{total:,}</td></tr>'
        )
    heads = "".join(
        f'<th scope="col" class="number" style="padding:.25rem .625rem">{_short(name)}</th>'
        for name in classes
    )
    return (
        '<div class="scroll"><table class="narrow"><thead><tr>'
        '<th scope="col">true \\ predicted</th>'
        f'{heads}<th scope="col" class="number">total</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _short(name: str) -> str:
    """Return a name that leaves room for others."""
    text = str(name)
    return escape(text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…")


def _cell(count: int, total: int, *, right: bool) -> str:
    share = count / total if total else 0.0
    shade = "var(--series)" if right else "var(--evaluated)"
    tint = f"color-mix(in srgb,{shade} {MOST_TINT * share:.0f}%,transparent)"
    weight = ";font-weight:600" if right else "" if count else ";color:var(--quiet)"
    said = f"{share:.1%} of the row"
    return (
        f'<td class="number" title="{said}" style="padding:.375rem .625rem;background:{tint}'
        f'{weight}">{count:,}</td>'
    )
