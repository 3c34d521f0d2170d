"""How well scores of variants agree with what is known of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics import metrics
from narrowcast.workloads.genomics.sequences.readers.vcf import Variant


@final
class Labelled:
    """Scores of the variants that have a label, gathered while they are written."""

    def __init__(self, column: str, positive: str | None) -> None:
        self._column, self._positive = column, positive
        self._labels, self._scores = list[str](), list[float]()
        self._without = 0

    def add(self, variant: Variant, score: float) -> None:
        """Take a variant; one without a label is counted."""
        label = _label(variant.fields, self._column)
        if label is None:
            raise ConfigError(
                f"{variant.location} has no column {self._column}, got {_columns(variant.fields)}."
            )
        if label in ("", "."):
            self._without += 1
            return
        self._labels.append(label)
        self._scores.append(score)

    def lines(self) -> list[str]:
        """Return what is to be said; refuse labels that scores cannot be held against."""
        scores, values = np.array(self._scores), _numbers(self._labels)
        missing = f", {self._without:,} without a label" if self._without else ""
        positive = self._positive_label(values)
        if positive is None:
            spearman = metrics.of_values(values, scores)["spearman"]
            return [f"{len(scores):,} variants{missing}", f"Spearman {spearman:.4f}"]
        truth = np.array([label == positive for label in self._labels])
        said = metrics.areas(truth, scores)
        spearman = metrics.of_values(truth.astype(float), scores)["spearman"]
        return [
            f"{len(scores):,} variants{missing}; {int(truth.sum()):,} are {positive}, which should "
            "have high scores",
            f"AUROC {said['auroc']:.4f}",
            f"AUPRC {said['auprc']:.4f}",
            f"Spearman {spearman:.4f}",
        ]

    def check_labels(self, variants: Iterable[Variant]) -> None:
        """Refuse labels that scores cannot be held against, before any is computed."""
        beforehand = Labelled(self._column, self._positive)
        for variant in variants:
            beforehand.add(variant, 0.0)
        beforehand._positive_label(_numbers(beforehand._labels))

    def _positive_label(self, values: Any) -> str | None:
        """Return the label that high scores are to have; None where labels are numbers."""
        kinds = sorted(set(self._labels))
        if len(kinds) < 2:
            what = f"all labels are {kinds[0]!r}" if kinds else "no variant has a label"
            raise ConfigError(
                f"--labels {self._column}: {what}, so there is nothing to compare. Name another "
                "column, or leave --labels out."
            )
        if self._positive is None and values is not None and len(kinds) > 2:
            return None
        return self._high(kinds, values)

    def _high(self, kinds: Sequence[str], values: Any) -> str:
        """Return the label that high scores are to have."""
        if self._positive is not None:
            if self._positive not in kinds:
                raise ConfigError(
                    f"--positive must be a value of {self._column}, such as "
                    f"{', '.join(kinds[:12])}, got {self._positive}."
                )
            return self._positive
        if len(kinds) > 2:
            raise ConfigError(
                f"{self._column} has {len(kinds)} classes: {', '.join(kinds[:12])}. Name the class "
                "that should have high scores with --positive."
            )
        return kinds[-1] if values is None else self._labels[int(np.argmax(values))]


def _label(fields: Mapping[str, Any], column: str) -> str | None:
    """Return a label as text: a column, or an entry of a VCF's INFO; None where neither is."""
    info = fields.get("INFO")
    if column in fields:
        value = fields[column]
    elif isinstance(info, Mapping):
        value = info.get(column, "")
    else:
        return None
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _columns(fields: Mapping[str, Any]) -> str:
    return ", ".join(list(fields)[:12]) or "none"


def _numbers(labels: Sequence[str]) -> Any:
    """Return labels as numbers; None where one is none."""
    try:
        values = [float(label) for label in labels]
    except ValueError:
        return None
    return np.array(values) if all(map(math.isfinite, values)) else None
