"""What is left of a run beside its weights: how it judged the sequences it was not trained on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from sklearn import metrics as sk

from narrowcast.workloads.genomics.targets import EveryLetter, Found, Labels, OneClass, Value

if TYPE_CHECKING:
    from narrowcast.workloads.genomics.build import Parts

FILE = "judged.json"
CURVE_POINTS = 200
"""Of a curve that is drawn."""
SHOWN_LETTERS = 2000
"""Of a row whose letters are drawn."""
SHOWN_POINTS = 2000
"""Of a cloud of predictions."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """What a network made of examples, row by row, and how good that is."""

    measured: dict[str, float]
    truth: list[Found]
    predicted: list[Found]


def write_judged(folder: Path, parts: "Parts", judged: Mapping[str, Judged]) -> None:
    """Write what the report draws: measures, and the picture that belongs to the target."""
    data = {name: _told(parts, each) for name, each in judged.items()}
    (folder / FILE).write_text(json.dumps(data) + "\n")


def _told(parts: "Parts", judged: Judged) -> dict[str, Any]:
    told: dict[str, Any] = {"measured": judged.measured}
    target = parts.target
    if isinstance(target, OneClass):
        truth, chances = np.array(judged.truth), np.stack(judged.predicted)
        told["confusion"] = _confusion(target.classes, truth, chances.argmax(1))
        told["curves"] = _curves(
            {name: (truth == at, chances[:, at]) for at, name in enumerate(target.classes)}
        )
    elif isinstance(target, Labels):
        truth, chances = np.stack(judged.truth), np.stack(judged.predicted)
        told["curves"] = _curves(
            {name: (truth[:, at] > 0, chances[:, at]) for at, name in enumerate(target.classes)}
        )
    elif isinstance(target, EveryLetter):
        truth, found = np.concatenate(judged.truth), np.concatenate(judged.predicted)
        told["confusion"] = _confusion(target.classes, truth, found)
        told["track"] = _track(target.classes, judged)
    elif isinstance(target, Value):
        every = max(1, len(judged.truth) // SHOWN_POINTS)
        pairs = zip(judged.truth[::every], judged.predicted[::every], strict=True)
        told["points"] = [[float(a), float(b)] for a, b in pairs]
    return told


def _confusion(classes: tuple[str, ...], truth: Found, chosen: Found) -> dict[str, Any]:
    """Count who was taken for whom, of the classes that occur."""
    present = sorted({*np.unique(truth).tolist(), *np.unique(chosen).tolist()})
    table = sk.confusion_matrix(truth, chosen, labels=present)
    return {"classes": [classes[at] for at in present], "counts": table.tolist()}


def _curves(of: Mapping[str, tuple[Found, Found]]) -> dict[str, Any]:
    """Return precision by recall for each class that occurs, thinned to what a picture shows."""
    curves = {}
    for name, (truth, score) in of.items():
        if not 0 < truth.sum() < len(truth):
            continue
        precision, recall, _ = sk.precision_recall_curve(truth, score)
        picked = np.linspace(0, len(recall) - 1, min(CURVE_POINTS, len(recall))).astype(int)
        curves[name] = {
            "area": float(sk.average_precision_score(truth, score)),
            "share": float(truth.mean()),
            "points": [
                [round(float(recall[at]), 4), round(float(precision[at]), 4)] for at in picked
            ],
        }
    return curves


def _track(classes: tuple[str, ...], judged: Judged) -> dict[str, Any]:
    """Return the letters of the row with most classes in it, as they are and as they were found."""
    variety = [len(np.unique(row)) for row in judged.truth]
    row = int(np.argmax(variety))
    return {
        "row": row,
        "classes": list(classes),
        "truth": judged.truth[row][:SHOWN_LETTERS].tolist(),
        "found": judged.predicted[row][:SHOWN_LETTERS].tolist(),
    }
