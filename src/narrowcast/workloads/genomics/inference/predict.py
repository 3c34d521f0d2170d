"""Predict for every record, and write tables, JSON lines, GFF3 or BED."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from narrowcast.errors import ConfigError
from narrowcast.runs import strict_json
from narrowcast.workloads.genomics.data.rows import Row, windows
from narrowcast.workloads.genomics.inference.finished import Finished
from narrowcast.workloads.genomics.sequences.labels import base_values
from narrowcast.workloads.genomics.targets import EveryLetter, Labels, OneClass, Target, Value

_Item = TypeVar("_Item")
Numbers = npt.NDArray[np.float64]


Format = Literal["csv", "tsv", "jsonl", "gff", "bed"]
ENDINGS: Mapping[str, Format] = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".gff": "gff", ".gff3": "gff", ".bed": "bed",
}  # fmt: skip
_TABLES = ("csv", "tsv", "jsonl")
DIGITS = 6
"""Significant digits written, about what fp32 has."""
LIKELY = 0.5
"""Probability above which a label is predicted."""


class Prediction(NamedTuple):
    """The prediction for a record."""

    name: str
    values: Numbers
    """Probabilities, (classes,); a value, (1,); or probabilities per letter, (letters, classes)."""


def predictions(run: Finished, rows: Iterable[Row], *, batch_size: int) -> Iterator[Prediction]:
    """Yield a prediction per row, in order."""
    for batch in batched(rows, batch_size):
        answers, _ = run.answers(batch)
        if isinstance(run.target, Value):
            result = answers.double() * run.target.spread + run.target.centre
        elif isinstance(run.target, Labels):
            result = answers.double().sigmoid()
        else:
            result = answers.double().softmax(-1)
        yield from map(Prediction, (row.name for row in batch), result.numpy())


def letter_predictions(
    run: Finished, rows: Iterable[Row], *, batch_size: int
) -> Iterator[Prediction]:
    """Yield class probabilities per letter for records of any length, read in windows."""
    pieces = (
        (number, row.name, window)
        for number, row in enumerate(rows)
        for window in windows([row], run.info.max_length, None)
    )
    for (_, name), matched in groupby(
        _of_windows(run, pieces, batch_size), key=lambda each: each[0]
    ):
        yield Prediction(name, np.concatenate([chances for _, chances in matched]))


def _of_windows(
    run: Finished, pieces: Iterable[tuple[int, str, Row]], batch_size: int
) -> Iterator[tuple[tuple[int, str], Numbers]]:
    for batch in batched(pieces, batch_size):
        rows = [window for *_, window in batch]
        answers, tokens = run.answers(rows)
        chances = answers.double().softmax(-1).numpy()
        for at, (number, name, window) in enumerate(batch):
            own = chances[at, : len(tokens[at])]
            spans = run.tokenizer.token_spans(tokens[at])
            yield (number, name), base_values(own, spans, len(window.sequence))


def batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield lists of up to `size` items."""
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


def format_named(name: str | None, output: str, *, along: bool) -> Format:
    """Return the output format by name or suffix; GFF and BED are for annotation (`along`)."""
    ending = "." + output.rpartition(".")[2].lower() if "." in output else ""
    kind = name or ("csv" if output == "-" else ENDINGS.get(ending))
    choices = [each for each in dict.fromkeys(ENDINGS.values()) if along or each in _TABLES]
    if kind not in choices:
        raise ConfigError(
            f"The format must be {', '.join(choices)} for this run, got {name or output}. Write "
            "--format, or a file with one of these suffixes."
        )
    return kind


def lines(result: Iterable[Prediction], target: Target, kind: Format) -> Iterator[str]:
    """Yield the output line by line."""
    if not isinstance(target, EveryLetter):
        yield from table((prediction_row(each, target) for each in result), kind)
        return
    rows = intervals(result, target.classes)
    if kind in _TABLES:
        yield from table(rows, kind)
        return
    if kind == "gff":
        yield "##gff-version 3\n"
    line = _gff if kind == "gff" else _bed
    yield from (line(row) for row in rows if row["class"] != target.classes[0])


def table(rows: Iterable[Mapping[str, Any]], kind: Format) -> Iterator[str]:
    """Yield rows as CSV or TSV with a header, or as JSON lines; mappings become columns."""
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
    """Round to DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def prediction_row(matched: Prediction, target: Target) -> dict[str, Any]:
    """Return the output row of a prediction."""
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


def intervals(result: Iterable[Prediction], classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield intervals of the likeliest class, counted from 1, end included."""
    for name, values in result:
        kinds, chances = values.argmax(-1), values.max(-1)
        starts = np.flatnonzero(np.diff(kinds, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True):
            yield {
                "name": name,
                "start": int(start) + 1,
                "end": int(end),
                "class": classes[kinds[start]],
                "chance": rounded(float(chances[start:end].mean())),
            }


def _gff(row: Mapping[str, Any]) -> str:
    kind, strand = _kind_and_strand(row["class"])
    name, kind = (quote(each, safe=" .:^*$@!+_?-|/()") for each in (row["name"], kind))
    location = f"{row['start']}\t{row['end']}\t{row['chance']:g}\t{strand}\t."
    return f"{name.replace(' ', '%20')}\tnarrowcast\t{kind}\t{location}\t.\n"


def _bed(row: Mapping[str, Any]) -> str:
    """Return a BED line, counted from 0, with a score out of 1000."""
    kind, strand = _kind_and_strand(row["class"])
    name, kind = (" ".join(each.split()) for each in (row["name"], kind))
    position = f"{name}\t{row['start'] - 1}\t{row['end']}"
    return f"{position}\t{kind}\t{row['chance'] * 1000:.0f}\t{strand}\n"


def _kind_and_strand(name: str) -> tuple[str, str]:
    """Split `gene-` into the kind and its strand."""
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
