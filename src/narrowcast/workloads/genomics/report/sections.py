"""The sections themselves, each of one thing that `judged.json` tells."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from narrowcast.errors import NarrowcastError
from narrowcast.plain_files import read_plain
from narrowcast.runs import Record, ReportSection, RunFolder, TaskInfo, strict_json
from narrowcast.runs.report_drawing import COLOURS, colour, legend
from narrowcast.workloads.genomics.report import pictures, tables
from narrowcast.workloads.genomics.results import FILE
from narrowcast.workloads.genomics.sequences.operations import gc

LARGEST = 2**24
"""Bytes of that file."""
WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError)
"""What reading a file that somebody else wrote, or that was damaged, can raise."""

Sets: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What was told of each set that was judged: validation, and test where there is one."""


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections, of what the folder has; what cannot be read is a sentence."""
    try:
        info = RunFolder(folder).task_info()
    except NarrowcastError as error:
        return [_sentence("What is trained, and on what", str(error))]
    result = []
    if info.notes:
        items = "".join(f"<li>{escape(line)}</li>" for line in info.notes)
        result.append(ReportSection(title="What is trained, and on what", html=f"<ul>{items}</ul>"))
    return [*result, *_judged(folder, info)]


def _judged(folder: Path, info: TaskInfo) -> Iterator[ReportSection]:
    try:
        sets = strict_json.loads(read_plain(folder / FILE, most=LARGEST).decode())
    except FileNotFoundError:  # the run has not ended
        return
    except (OSError, ValueError, RecursionError) as error:
        yield _sentence("Measures", f"{FILE} cannot be read: {error}")
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


def _each(sets: Sets, key: str, draw: Callable[[Mapping[str, Any]], str]) -> str:
    """Draw the same of every set that has it, side by side where there are several."""
    there = {name: message for name, message in sets.items() if message.get(key)}
    figures = [
        (f"<h3>{escape(name.capitalize())}</h3>" if len(sets) > 1 else "") + draw(notice)
        for name, notice in there.items()
    ]
    if len(figures) < 2:
        return "".join(figures)
    return f'<div class="pair">{"".join(f"<div>{each}</div>" for each in figures)}</div>'


def _last(sets: Sets, key: str) -> tuple[str, Any] | None:
    """Return what was told of the last set that has it, which is the test where there is one."""
    there = [(name, info[key]) for name, info in sets.items() if info.get(key)]
    return there[-1] if there else None


def _measures(sets: Sets, info: TaskInfo) -> str:
    return tables.measures(sets, info) if sets else ""


def _confusion(sets: Sets, info: TaskInfo) -> str:
    def draw(message: Mapping[str, Any]) -> str:
        return tables.confusion(message["confusion"]["classes"], message["confusion"]["counts"])

    html = _each(sets, "confusion", draw)
    note = (
        "Rows are what sequences are, columns what they were taken for; tints are shares of rows."
    )
    return html and html + _noted(note)


def _curves(sets: Sets, info: TaskInfo) -> str:
    def draw(message: Mapping[str, Any]) -> str:
        curves = message["curves"]
        if not curves["classes"]:
            return _noted("All sequences are of one class: there is no curve.")
        return pictures.precision_recall(curves["classes"], curves["others"])

    html = _each(sets, "curves", draw)
    note = "Each class against all others, with the area below its curve; dashed: guessing."
    return html and html + _noted(note)


def _cloud(sets: Sets, info: TaskInfo) -> str:
    def draw(message: Mapping[str, Any]) -> str:
        spearman = message["measured"].get("spearman")
        pairs = [(float(true), float(matched)) for true, matched in message["points"]]
        finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
        if not finite:
            return _noted("What was predicted is not finite.")
        return pictures.cloud(finite, None if spearman is None else float(spearman))

    html = _each(sets, "points", draw)
    return html and html + _noted("The dashed line is where both are the same.")


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
    note = f"Sequences of the {name} set with most classes in them; positions in {unit}s."
    if len(others) > COLOURS:
        note += " Colours begin again after the eighth."
    return legend(named) + drawn + _noted(note)


def _saliency(sets: Sets, info: TaskInfo) -> str:
    last = _last(sets, "saliency")
    if last is None:
        return ""
    name, variants = last
    drawn = []
    for variant in variants:
        chance = f" ({float(variant['chance']):.0%})" if "chance" in variant else ""
        said = f"{variant['name']}: found {variant['found']}{chance}, is {variant['truth']}"
        drawn.append(f"<h3>{escape(said)}</h3>{pictures.salient(variant)}")
    what = "log-odds of what was found" if "chance" in variants[0] else "value that was predicted"
    note = (
        f"Variants of the {name} set. A bar is how much the letter adds to the {what}: the score "
        "less its mean with the other letters there, in both sequences alike. The variant is "
        "marked, with the letter it replaces below; its bar is of the alternative alone."
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
        f"GC is {float(shares['written']):.1%} of what was written and "
        f"{float(shares['held_out']):.1%} of the {name} set. "
        if shares
        else ""
    )
    runs = f"{spectrum['k']}-mers" if spectrum["k"] > 1 else "letters"
    parts.append(f"<p>{escape(f'{strong}Shares of {runs} correlate by {agree:.3f}.')}</p>")
    parts.append(pictures.spectrum(spectrum))
    for sample in message["samples"]:
        share = f", GC {gc(str(sample['written'])):.1%}" if shares else ""
        parts.append(
            f"<h3>{escape(str(sample['name']))}{share}</h3>"
            '<pre style="white-space:pre-wrap;overflow-wrap:anywhere"><span class="quiet">'
            f"{escape(str(sample['prompt']))}</span>{escape(str(sample['written']))}</pre>"
        )
    parts.append(
        _noted(f"Pale letters are given, from the {name} set; the network goes on from them.")
    )
    return "".join(parts)


DRAWN: Mapping[str, Callable[[Sets, TaskInfo], str]] = {
    "Measures": _measures,
    "Who was taken for whom": _confusion,
    "Precision by recall": _curves,
    "Predicted and true values": _cloud,
    "Classes along sequences": _tracks,
    "Letters that count": _saliency,
    "What the network writes": _written,
}
"""The sections of what was judged, each drawn where there is something to draw."""
