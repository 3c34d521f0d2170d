"""Variant scores.

With a pretrained run, the log-likelihood of the alternative window minus that of the reference, in
nats: the mean of both strands for DNA. With a run trained on variants, the predicted value, or the
mean class number scaled to 0 to 1.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics import metrics
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.inference.finished import Finished
from narrowcast.workloads.genomics.inference.predict import (
    batched,
    prediction_row,
    predictions,
    rounded,
)
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.operations import reverse_complement
from narrowcast.workloads.genomics.sequences.readers.vcf import Variant
from narrowcast.workloads.genomics.sequences.variants import VariantPair
from narrowcast.workloads.genomics.targets import Labels, NextToken, OneClass


class Scored(NamedTuple):
    """A variant, its score, and further columns."""

    variant: Variant
    score: float
    more: dict[str, Any]


def require_scores(run: Finished) -> None:
    """Check that a run can score variants."""
    if run.info.alphabet == "protein":
        raise ConfigError(
            f"{run.name} was trained on proteins, but variants are DNA. Use another run."
        )
    if isinstance(run.target, NextToken):
        return
    if not run.info.pairs:
        raise ConfigError(
            f"{run.name} was trained for {run.info.task} on single sequences, which gives no "
            "variant score. Use a run of `narrowcast genomics pretrain`, or one trained on pairs."
        )
    if isinstance(run.target, Labels):
        raise ConfigError(
            f"{run.name} predicts several labels per variant, which gives no single score. Use "
            "`narrowcast genomics predict`."
        )


def scores(run: Finished, pairs: Iterable[VariantPair], *, batch_size: int) -> Iterator[Scored]:
    """Yield a score per variant, in order."""
    for batch in batched(pairs, batch_size):
        if isinstance(run.target, NextToken):
            texts = [list(each) for each in zip(*map(evened, batch), strict=True)]
            places = [pair.variant.location for pair in batch]
            before, after = (log_likelihoods(run, each, places) for each in texts)
            for pair, ratio in zip(batch, after - before, strict=True):
                yield Scored(pair.variant, float(ratio), {})
        else:
            yield from _judged(run, batch)


def evened(pair: VariantPair) -> tuple[str, str]:
    """Return both windows with equally many known letters.

    At the end of a contig an insertion pushes nothing out of its window, and each extra letter
    would lower the likelihood. Letters far from the variant become unknown instead.
    """
    texts = [pair.reference, pair.alternative]
    known = [len(text) - text.count(DNA.unknown) for text in texts]
    longer, more = int(known[1] > known[0]), abs(known[1] - known[0])
    allele = len((pair.variant.reference, pair.variant.alternative)[longer])
    letters = list(texts[longer])
    there = [at for at, letter in enumerate(letters) if letter != DNA.unknown]
    left = [at for at in there if at < pair.at]
    right = [at for at in there if at >= pair.at + allele][::-1]
    for at in max(left, right, key=len)[:more]:
        letters[at] = DNA.unknown
    texts[longer] = "".join(letters)
    return texts[0], texts[1]


def log_likelihoods(
    run: Finished, sequences: Sequence[str], places: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Return log-likelihoods in nats; for DNA, the mean of both strands."""
    strands = [sequences]
    if run.info.alphabet == "dna":
        strands.append([reverse_complement(text) for text in sequences])
    of_each = np.stack([_one_strand(run, texts, places) for texts in strands])
    mean: npt.NDArray[np.float64] = of_each.mean(0)
    return mean


def _one_strand(
    run: Finished, sequences: Sequence[str], places: Sequence[str]
) -> npt.NDArray[np.float64]:
    rows = [
        Row(sequence=text, location=location)
        for text, location in zip(sequences, places, strict=True)
    ]
    answers, tokens = run.answers(rows)
    out = np.empty(len(rows))
    for at, ids in enumerate(tokens):
        chances = answers[at, : len(ids) - 1].double().log_softmax(-1)
        following = torch.from_numpy(ids[1:])
        likelihood = chances.gather(1, following[:, None])[:, 0]
        out[at] = likelihood[following != run.tokenizer.unknown_id].sum().item()
    return out


def _judged(run: Finished, batch: Sequence[VariantPair]) -> Iterator[Scored]:
    rows = [
        Row(sequence=pair.reference, alternative=pair.alternative, location=pair.variant.location)
        for pair in batch
    ]
    result = predictions(run, rows, batch_size=len(rows))
    for pair, prediction in zip(batch, result, strict=True):
        if not isinstance(run.target, OneClass):
            yield Scored(pair.variant, float(prediction.values[0]), {})
            continue
        score = float(prediction.values @ np.linspace(0, 1, len(run.target.classes)))
        row = prediction_row(prediction, run.target)
        yield Scored(pair.variant, score, {key: row[key] for key in ("class", "chance")})


def score_row(scored: Scored) -> dict[str, Any]:
    """Return the output row of a score."""
    variant = scored.variant
    return {
        "chrom": variant.chrom,
        "pos": variant.position,
        "ref": variant.reference,
        "alt": variant.alternative,
        "score": rounded(scored.score),
        **scored.more,
    }


@final
class Labelled:
    """Compares scores with labels."""

    def __init__(self, column: str, positive: str | None) -> None:
        self._column, self._positive = column, positive
        self._labels, self._scores = list[str](), list[float]()
        self._without = 0

    def add(self, variant: Variant, score: float) -> None:
        """Add a scored variant."""
        label = _label_text(variant.fields, self._column)
        if label is None:
            columns = ", ".join(list(variant.fields)[:12]) or "none"
            raise ConfigError(f"{variant.location} has no column {self._column}, got {columns}.")
        if label in ("", "."):
            self._without += 1
            return
        self._labels.append(label)
        self._scores.append(score)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        scores, values = np.array(self._scores), _numbers(self._labels)
        missing = f", {self._without:,} without a label" if self._without else ""
        positive = self._positive_label(values)
        if positive is None:
            spearman = metrics.of_values(values, scores)["spearman"]
            return [f"{len(scores):,} variants{missing}", f"Spearman {spearman:.4f}"]
        truth = np.array([label == positive for label in self._labels])
        said = metrics.areas([(truth, scores)])
        spearman = metrics.of_values(truth.astype(float), scores)["spearman"]
        return [
            f"{len(scores):,} variants{missing}; {int(truth.sum()):,} are {positive}, which should "
            "have high scores",
            f"AUROC {said['auroc']:.4f}",
            f"AUPRC {said['auprc']:.4f}",
            f"Spearman {spearman:.4f}",
        ]

    def check_labels(self, variants: Iterable[Variant]) -> None:
        """Check the labels of all variants before any score is computed."""
        beforehand = Labelled(self._column, self._positive)
        for variant in variants:
            beforehand.add(variant, 0.0)
        beforehand._positive_label(_numbers(beforehand._labels))

    def _positive_label(self, values: Any) -> str | None:
        """Return the label that should have high scores; None if labels are numbers."""
        kinds = sorted(set(self._labels))
        if len(kinds) < 2:
            what = f"all labels are {kinds[0]!r}" if kinds else "no variant has a label"
            raise ConfigError(
                f"--labels {self._column}: {what}, so there is nothing to compare. Name another "
                "column, or leave --labels out."
            )
        if self._positive is not None and self._positive not in kinds:
            raise ConfigError(
                f"--positive must be a value of {self._column}, such as {', '.join(kinds[:12])}, "
                f"got {self._positive}."
            )
        if self._positive is not None or (values is not None and len(kinds) > 2):
            return self._positive
        if len(kinds) > 2:
            raise ConfigError(
                f"{self._column} has {len(kinds)} classes: {', '.join(kinds[:12])}. Name the class "
                "that should have high scores with --positive."
            )
        return kinds[-1] if values is None else self._labels[int(np.argmax(values))]


def _label_text(fields: Mapping[str, Any], column: str) -> str | None:
    """Return a label from a column or from INFO as text; None if neither has it."""
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


def _numbers(labels: Sequence[str]) -> Any:
    """Return labels as numbers, or None if one is not a finite number."""
    try:
        values = [float(label) for label in labels]
    except ValueError:
        return None
    return np.array(values) if all(map(math.isfinite, values)) else None
