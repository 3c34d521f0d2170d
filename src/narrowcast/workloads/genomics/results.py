"""What is left of a run beside its weights: how it judged the sequences it was not trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from sklearn import metrics as sk

from narrowcast.runs import RunFolder
from narrowcast.workloads.genomics.targets import EveryLetter, Labels, OneClass, Predicted, Value

if TYPE_CHECKING:
    from narrowcast.workloads.genomics.build import Parts

FILE = "judged.json"
CURVES, CURVE_POINTS = 8, 200
"""Curves that a picture can tell apart, and points of each."""
SHOWN_CLASSES = 20
"""Of a table of who was taken for whom; the rarer ones are one row."""
TRACKS, SHOWN_LETTERS = 3, 2000
"""Rows whose letters are drawn, and letters of each."""
SHOWN_POINTS = 2000
"""Of a cloud of predictions."""
OTHERS = "others"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """What a network made of examples, row by row, and how good that is."""

    measured: dict[str, float]
    truth: list[Predicted]
    predicted: list[Predicted]
    names: Sequence[str] = ()
    """Of the rows."""


def write_judged(
    folder: Path,
    parts: "Parts",
    judged: Mapping[str, Judged],
    pictures: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write what the report draws: measures, and the picture that belongs to the target.

    Both mappings are by the set that was judged; of `pictures`, what took the network to make.
    """
    info = {
        name: {**_result_data(parts, each), **pictures.get(name, {})}
        for name, each in judged.items()
    }
    RunFolder(folder).write_json(FILE, info)


def _result_data(parts: "Parts", judged: Judged) -> dict[str, Any]:
    message: dict[str, Any] = {"measured": judged.measured, "rows": len(judged.truth)}
    target = parts.target
    if isinstance(target, OneClass):
        truth, chances = np.array(judged.truth), np.stack(judged.predicted)
        message["confusion"] = _confusion(target.classes, truth, chances.argmax(1))
        message["curves"] = _curves(
            {name: (truth == at, chances[:, at]) for at, name in enumerate(target.classes)}
        )
    elif isinstance(target, Labels):
        truth, chances = np.stack(judged.truth), np.stack(judged.predicted)
        message["curves"] = _curves(
            {name: (truth[:, at] > 0, chances[:, at]) for at, name in enumerate(target.classes)}
        )
    elif isinstance(target, EveryLetter):
        truth, result = np.concatenate(judged.truth), np.concatenate(judged.predicted)
        message["confusion"] = _confusion(target.classes, truth, result)
        message["tracks"] = _tracks(target.classes, judged)
        message["unit"] = parts.unit
    elif isinstance(target, Value):
        picked = np.linspace(0, len(judged.truth) - 1, min(SHOWN_POINTS, len(judged.truth)))
        message["points"] = [
            [_digits(judged.truth[at]), _digits(judged.predicted[at])] for at in picked.astype(int)
        ]
    return message


def _confusion(classes: tuple[str, ...], truth: Predicted, chosen: Predicted) -> dict[str, Any]:
    """Count who was taken for whom, of the classes that occur."""
    counts = np.bincount(np.concatenate([truth, chosen]), minlength=len(classes))
    present = np.flatnonzero(counts)
    if len(present) > SHOWN_CLASSES:
        frequent = np.argsort(-counts, kind="stable")[: SHOWN_CLASSES - 1]
        numbers = np.full(len(classes), SHOWN_CLASSES - 1)
        present = np.sort(frequent)
    else:
        numbers = np.zeros(len(classes), dtype=np.int64)
    numbers[present] = np.arange(len(present))
    rare = len(np.flatnonzero(counts)) - len(present)
    names = [classes[at] for at in present] + ([f"{rare:,} {OTHERS}"] if rare else [])
    # Not scikit-learn's, which warns of a single class.
    pairs = numbers[truth] * len(names) + numbers[chosen]
    table = np.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), -1)
    return {"classes": names, "counts": table.tolist()}


def _curves(of: Mapping[str, tuple[Predicted, Predicted]]) -> dict[str, Any]:
    """Return precision by recall for each class that occurs, thinned to what a picture shows.

    Of many classes the most frequent; the areas of all others are one number.
    """
    there = {name: pair for name, pair in of.items() if 0 < pair[0].sum() < len(pair[0])}
    frequent = set(sorted(there, key=lambda name: -int(there[name][0].sum()))[:CURVES])
    curves, rest = dict[str, Any](), list[float]()
    for name, (truth, score) in there.items():
        area = float(sk.average_precision_score(truth, score))
        if name not in frequent:
            rest.append(area)
            continue
        precision, recall, _ = sk.precision_recall_curve(truth, score)
        picked = np.linspace(0, len(recall) - 1, min(CURVE_POINTS, len(recall))).astype(int)
        curves[name] = {
            "area": area,
            "share": float(truth.mean()),
            "points": [
                [round(float(recall[at]), 4), round(float(precision[at]), 4)] for at in picked
            ],
        }
    more = {"classes": len(rest), "area": float(np.mean(rest))} if rest else None
    return {"classes": curves, "others": more}


def _tracks(classes: tuple[str, ...], judged: Judged) -> dict[str, Any]:
    """Return the letters of the rows with most classes in them, as they are and were found."""
    variety = np.array([len(np.unique(row)) for row in judged.truth])
    rows = np.sort(np.argsort(-variety, kind="stable")[:TRACKS])
    return {
        "classes": list(classes),
        "rows": [
            {
                "name": judged.names[row] if judged.names else "",
                "truth": _runs(judged.truth[row][:SHOWN_LETTERS]),
                "found": _runs(judged.predicted[row][:SHOWN_LETTERS]),
            }
            for row in rows
        ],
    }


def _runs(numbers: Predicted) -> list[list[int]]:
    """Return how often each number comes before the next one does: [class, letters], in order."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    lengths = np.diff(starts, append=len(numbers))
    return [[int(numbers[at]), int(n)] for at, n in zip(starts, lengths, strict=True)]


def _digits(number: Any) -> float:
    return float(f"{float(number):.6g}")
