"""Predictions as lines of text: a table, JSON lines, GFF3 or BED."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from narrowcast.errors import ConfigError
from narrowcast.runs import strict_json
from narrowcast.workloads.genomics.inference.predict import Prediction, intervals
from narrowcast.workloads.genomics.targets import EveryLetter, Labels, OneClass, Target, Value

Format = Literal["csv", "tsv", "jsonl", "gff", "bed"]
ENDINGS: Mapping[str, Format] = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".gff": "gff", ".gff3": "gff", ".bed": "bed",
}  # fmt: skip
DIGITS = 6
"""Of a chance or a value: what fp32 has."""
LIKELY = 0.5
"""The chance from which on a record has a label."""


def format_named(name: str | None, output: str, *, along: bool) -> Format:
    """Return the format that is asked for, or that the name of a file ends like.

    `along` says whether there are stretches of records to write, which GFF and BED are for.
    """
    ending = "." + output.rpartition(".")[2].lower() if "." in output else ""
    kind = name or ("csv" if output == "-" else ENDINGS.get(ending))
    choices = [each for each in dict.fromkeys(ENDINGS.values()) if along or each in _TABLES]
    if kind not in choices:
        raise ConfigError(
            f"The format must be {', '.join(choices)} for this run, got {name or output}. Write "
            "--format, or a file with one of these suffixes."
        )
    return kind


_TABLES = ("csv", "tsv", "jsonl")


def lines(result: Iterable[Prediction], target: Target, kind: Format) -> Iterator[str]:
    """Yield what is written, a line with its end at a time."""
    if isinstance(target, EveryLetter):
        stretches = _stretches(result, target.classes)
        if kind == "gff":
            yield "##gff-version 3\n"
            yield from (_gff(row, target.classes[0]) for row in stretches)
        elif kind == "bed":
            yield from (_bed(row, target.classes[0]) for row in stretches)
        else:
            yield from table(stretches, kind)
    else:
        yield from table((_prediction_row(each, target) for each in result), kind)


def table(rows: Iterable[Mapping[str, Any]], kind: Format) -> Iterator[str]:
    """Yield rows of one kind as CSV, TSV with a line of names, or JSON lines.

    A mapping in a row is as many columns.
    """
    names: Sequence[str] | None = None
    for row in rows:
        if kind == "jsonl":
            yield strict_json.dumps(row) + "\n"
            continue
        flat = _flat(row)
        if names is None:
            names = list(flat)
            yield _separated(names, kind)
        yield _separated(list(flat.values()), kind)


def rounded(value: float) -> float:
    """Return a number with the digits that mean something."""
    return float(f"{value:.{DIGITS}g}")


def _prediction_row(matched: Prediction, target: Target) -> dict[str, Any]:
    numbers = [rounded(float(each)) for each in matched.values]
    if isinstance(target, Value):
        return {"name": matched.name, "value": numbers[0]}
    assert isinstance(target, OneClass | Labels)
    chances = dict(zip(target.classes, numbers, strict=True))
    if isinstance(target, Labels):
        likely = [name for name, chance in chances.items() if chance > LIKELY]
        return {"name": matched.name, "labels": ";".join(likely), "chance": chances}
    best = target.classes[int(matched.values.argmax())]
    return {"name": matched.name, "class": best, "chance": chances}


def _stretches(result: Iterable[Prediction], classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield stretches as biologists count: from 1, the last letter in it."""
    for each in result:
        for start, end, kind, chance in intervals(each.values):
            yield {
                "name": each.name,
                "start": start + 1,
                "end": end,
                "class": classes[kind],
                "chance": rounded(chance),
            }


def _gff(row: Mapping[str, Any], between: str) -> str:
    """Return a feature; nothing for what lies between features."""
    if row["class"] == between:
        return ""
    kind, strand = _kind_and_strand(row["class"])
    name, kind = (quote(each, safe=" .:^*$@!+_?-|/()") for each in (row["name"], kind))
    location = f"{row['start']}\t{row['end']}\t{row['chance']:g}\t{strand}\t."
    return f"{name.replace(' ', '%20')}\tnarrowcast\t{kind}\t{location}\t.\n"


def _bed(row: Mapping[str, Any], between: str) -> str:
    """Return an interval from 0, with a chance of a thousand."""
    if row["class"] == between:
        return ""
    kind, strand = _kind_and_strand(row["class"])
    name, kind = (" ".join(each.split()) for each in (row["name"], kind))
    position = f"{name}\t{row['start'] - 1}\t{row['end']}"
    return f"{position}\t{kind}\t{row['chance'] * 1000:.0f}\t{strand}\n"


def _kind_and_strand(name: str) -> tuple[str, str]:
    """Take a class apart as features are read: `gene-` is a gene of the reverse strand."""
    return (name[:-1], name[-1]) if name[1:].endswith(("+", "-")) else (name, ".")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}_{name}": each for name, each in value.items()}
        else:
            flat[key] = value
    return flat


def _separated(cells: Sequence[Any], kind: Format) -> str:
    text = io.StringIO()
    csv.writer(text, delimiter="\t" if kind == "tsv" else ",", lineterminator="\n").writerow(cells)
    return text.getvalue()
