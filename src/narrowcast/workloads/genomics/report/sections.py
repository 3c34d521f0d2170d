"""The sections of a genomics report, drawn from `judged.json`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from narrowcast.errors import NarrowcastError
from narrowcast.plain_files import read_plain
from narrowcast.runs import Record, ReportSection, RunFolder, TaskInfo, strict_json
from narrowcast.runs.report_drawing import COLOURS, colour, legend
from narrowcast.runs.strict_json import NONFINITE
from narrowcast.workloads.genomics.report import pictures
from narrowcast.workloads.genomics.results import FILE, verdict
from narrowcast.workloads.genomics.sequences.operations import gc

LARGEST = 2**24
"""Maximum bytes of that file."""
WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError)
"""Errors that a damaged file can cause."""

Sets: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The results of each evaluated set: validation, and test if there is one."""
MOST_TINT = 45
"""Percent of colour behind text, which stays readable in light and dark."""
LONGEST_NAME = 32
"""Maximum letters of a class name in a table."""


def _measures_table(sets: Sets, info: TaskInfo, *, counted: bool = True) -> str:
    """Return a table of metrics, one column per set, in the order of the task."""
    if not sets:
        return ""
    known = {metric.name: metric for metric in info.metrics}
    matches = {name for message in sets.values() for name in message["measured"]}
    names = [name for name in known if name in matches] + sorted(matches - set(known))
    rows = []
    for name in names:
        cells = []
        for notice in sets.values():
            text = ""
            if (value := notice["measured"].get(name)) is not None:
                number = NONFINITE[value] if isinstance(value, str) else float(value)
                form = (known[name].text if name in known else "") or ".4f"
                text = f"{number:{form}}" if math.isfinite(number) else f"{number}"
            cells.append(f'<td class="number">{escape(text)}</td>')
        rows.append(f'<tr><th scope="row">{escape(_spoken(name))}</th>{"".join(cells)}</tr>')
    counts = {name: int(each["rows"]) for name, each in sets.items()}
    heads = "".join(
        f'<th scope="col" class="number">{escape(name)}'
        f"{f', {count:,} row' + 's' * (count != 1) if counted else ''}</th>"
        for name, count in counts.items()
    )
    return (
        f'<div class="scroll"><table class="narrow"><thead><tr><th scope="col">metric</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _spoken(name: str) -> str:
    if name in ("mcc", "f1", "auroc", "auprc", "rmse"):
        return name.upper()
    return name.capitalize() if name in ("spearman", "pearson") else name.replace("_", " ")


def _confusion_table(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
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
    """Return a class name, shortened."""
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


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections that the run folder has data for; an unreadable file becomes text."""
    try:
        info = RunFolder(folder).task_info()
    except NarrowcastError as error:
        return [_sentence("Model and data", str(error))]
    result = []
    if info.notes:
        items = "".join(f"<li>{escape(line)}</li>" for line in info.notes)
        result.append(ReportSection(title="Model and data", html=f"<ul>{items}</ul>"))
    return [*result, *_judged(folder, info)]


def _judged(folder: Path, info: TaskInfo) -> Iterator[ReportSection]:
    try:
        sets = strict_json.loads(read_plain(folder / FILE, most=LARGEST).decode())
    except FileNotFoundError:  # the run has not ended
        return
    except (OSError, ValueError, RecursionError) as error:
        yield _sentence("Metrics", f"{FILE} cannot be read: {error}")
        return
    for title, draw in DRAWN.items():
        try:
            html = draw(sets, info)
        except WRONG as error:
            yield _sentence(title, f"{FILE} is damaged: {type(error).__name__}: {error}")
            continue
        if html:
            yield ReportSection(title=title, html=html)


def _sentence(title: str, said: str) -> ReportSection:
    return ReportSection(title=title, html=f"<p>{escape(said)}</p>")


def _noted(said: str) -> str:
    return f'<p class="note">{escape(said)}</p>'


def _each(sets: Sets, key: str, draw: Callable[[Mapping[str, Any]], str], note: str) -> str:
    """Draw one figure per set that has `key`, side by side, with a note below."""
    there = {name: message for name, message in sets.items() if message.get(key)}
    figures = [
        (f"<h3>{escape(name.capitalize())}</h3>" if len(sets) > 1 else "") + draw(notice)
        for name, notice in there.items()
    ]
    if len(figures) > 1:
        figures = [f'<div class="pair">{"".join(f"<div>{each}</div>" for each in figures)}</div>']
    return figures[0] + _noted(note) if figures else ""


def _last(sets: Sets, key: str) -> tuple[str, Any] | None:
    """Return the name and value of the last set that has `key` (the test set if there is one)."""
    there = [(name, info[key]) for name, info in sets.items() if info.get(key)]
    return there[-1] if there else None


def _baseline_tables(sets: Sets, info: TaskInfo) -> str:
    """Return the metrics beside those of the baselines, the last set at the top."""
    there = {
        name: message["comparison"] for name, message in sets.items() if message.get("comparison")
    }
    parts = []
    for name, comparison in reversed(there.items()):
        measured = {row: {"measured": each, "rows": sets[name]["rows"]}
                    for row, each in comparison["rows"].items()}  # fmt: skip
        parts.append(f"<h3>{escape(name.capitalize())}</h3>")
        parts.append(f"<p><strong>{escape(sentence(comparison))}.</strong></p>")
        parts.append(_measures_table(measured, info, counted=False))
    note = (
        "Baselines are logistic regressions (ridge regressions for values) on the same training "
        "data. The validation data selects their penalty, the baseline that counts, and the "
        "weights of network and linear model. The interval is a bootstrap over sequences."
    )
    return "".join(parts) + _noted(note) if parts else ""


def sentence(comparison: Mapping[str, Any]) -> str:
    """Return the verdict as a sentence that begins in upper case."""
    text = verdict(comparison)
    return text[:1].upper() + text[1:]


def _confusion(sets: Sets, info: TaskInfo) -> str:
    def draw(message: Mapping[str, Any]) -> str:
        return _confusion_table(message["confusion"]["classes"], message["confusion"]["counts"])

    note = "Rows are true classes, columns are predicted classes. Shading shows the share of a row."
    return _each(sets, "confusion", draw, note)


def _curves(sets: Sets, info: TaskInfo) -> str:
    def draw(message: Mapping[str, Any]) -> str:
        curves = message["curves"]
        if not curves["classes"]:
            return _noted("All sequences have the same class, so there is no curve.")
        return pictures.precision_recall(curves["classes"], curves["others"])

    note = "One curve per class against all others, with its area. Dashed lines show chance."
    return _each(sets, "curves", draw, note)


def _cloud(sets: Sets, info: TaskInfo) -> str:
    def draw(message: Mapping[str, Any]) -> str:
        spearman = message["measured"].get("spearman")
        pairs = [(float(true), float(matched)) for true, matched in message["points"]]
        finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
        if not finite:
            return _noted("The predictions are not finite.")
        return pictures.cloud(finite, None if spearman is None else float(spearman))

    note = "On the dashed line, predicted and true values are equal."
    return _each(sets, "points", draw, note)


def _tracks(sets: Sets, info: TaskInfo) -> str:
    last = _last(sets, "tracks")
    if last is None:
        return ""
    name, tracks = last
    unit = str(sets[name].get("unit", "letter"))
    rows = tracks["rows"]
    used = sorted({int(kind) for row in rows for key in ("truth", "found") for kind, _ in row[key]})
    # The first class is what lies between all others: ground, not figure.
    shades = {0: "var(--grid)"}
    others = [kind for kind in used if kind != 0]
    shades |= {kind: colour(location) for location, kind in enumerate(others)}
    named = [(shades[kind], str(tracks["classes"][kind])) for kind in used]
    drawn = "".join(
        f"<h3>{escape(str(row['name']))}</h3>{pictures.track(row, shades, unit)}" for row in rows
    )
    note = f"Sequences of the {name} set with the most classes. Positions are in {unit}s."
    if len(others) > COLOURS:
        note += " Colours repeat after the eighth class."
    return legend(named) + drawn + _noted(note)


def _saliency(sets: Sets, info: TaskInfo) -> str:
    last = _last(sets, "saliency")
    if last is None:
        return ""
    name, variants = last
    drawn = []
    for variant in variants:
        chance = f" ({float(variant['chance']):.0%})" if "chance" in variant else ""
        said = f"{variant['name']}: predicted {variant['found']}{chance}, true {variant['truth']}"
        drawn.append(f"<h3>{escape(said)}</h3>{pictures.salient(variant)}")
    what = "log-odds of the predicted class" if "chance" in variants[0] else "predicted value"
    note = (
        f"In-silico mutagenesis of variants from the {name} set. A bar shows how much a letter "
        f"adds to the {what}: the score minus its mean over the other letters at that position, "
        "substituted in both sequences. The variant is highlighted, with the reference letter "
        "below it; at the variant, only the alternative sequence is changed."
    )
    return "".join(drawn) + _noted(note)


def _written(sets: Sets, info: TaskInfo) -> str:
    last = _last(sets, "written")
    if last is None:
        return ""
    name, message = last
    parts = []
    spectrum = message["spectrum"]
    agree = pictures.correlation(
        [float(v) for v in spectrum["held_out"]], [float(v) for v in spectrum["written"]]
    )
    shares = message.get("gc")
    strong = (
        f"GC content is {float(shares['written']):.1%} in generated sequences and "
        f"{float(shares['held_out']):.1%} in the {name} set. "
        if shares
        else ""
    )
    runs = f"{spectrum['k']}-mer" if spectrum["k"] > 1 else "letter"
    parts.append(f"<p>{escape(f'{strong}Correlation of {runs} frequencies: {agree:.3f}.')}</p>")
    parts.append(pictures.spectrum(spectrum))
    for sample in message["samples"]:
        share = f", GC {gc(str(sample['written'])):.1%}" if shares else ""
        parts.append(
            f"<h3>{escape(str(sample['name']))}{share}</h3>"
            '<pre style="white-space:pre-wrap;overflow-wrap:anywhere"><span class="quiet">'
            f"{escape(str(sample['prompt']))}</span>{escape(str(sample['written']))}</pre>"
        )
    parts.append(
        _noted(f"Pale letters are the prompt, from the {name} set. The network wrote the rest.")
    )
    return "".join(parts)


DRAWN: Mapping[str, Callable[[Sets, TaskInfo], str]] = {
    "Metrics": _measures_table,
    "Baselines": _baseline_tables,
    "Confusion matrix": _confusion,
    "Precision-recall curve": _curves,
    "Predicted and true values": _cloud,
    "Annotation tracks": _tracks,
    "In-silico mutagenesis": _saliency,
    "Generated sequences": _written,
}
"""The sections by title, each drawn if there is data for it."""
