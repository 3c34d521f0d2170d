"""Targets: the head, loss and metrics of each kind of prediction.

`per_letter` targets count letters: their `loss` is the mean over `count(batch)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.genomics import metrics
from narrowcast.workloads.genomics.data.examples import Batch
from narrowcast.workloads.genomics.data.rows import UNLABELLED
from narrowcast.workloads.genomics.models.heads import (
    NextTokenHead,
    Pool,
    SequenceHead,
    TokenHead,
)

Predicted: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = Sequence[Predicted]


class _PerSequence(ABC):
    """A target with one prediction per sequence."""

    per_letter: ClassVar = False

    @abstractmethod
    def outputs(self) -> int:
        """Return the width of the head."""

    def head(self, width: int, *, pool: Pool, dropout: float, length: int) -> nn.Module:
        return SequenceHead(width, self.outputs(), pool, dropout, length=length)

    def count(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["tokens"]))

    def truth(self, batch: Batch) -> list[Predicted]:
        return list(batch["targets"].cpu().numpy())


@final
@dataclass(frozen=True, kw_only=True)
class OneClass(_PerSequence):
    """One class per sequence; probabilities are stored."""

    metrics: ClassVar = metrics.OF_CLASSES
    classes: tuple[str, ...]
    smoothing: float = 0.0

    def outputs(self) -> int:
        return len(self.classes)

    def loss(self, result: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(result, batch["targets"], label_smoothing=self.smoothing)

    def predicted(self, result: Tensor, batch: Batch) -> list[Predicted]:
        return list(result.softmax(-1).cpu().numpy())

    def measured(self, truth: Rows, predicted: Rows) -> dict[str, float]:
        return metrics.of_classes(np.array(truth), np.stack(list(predicted)))

    def headline(self, truth: Predicted, predicted: Predicted) -> float:
        """Return the first of the metrics."""
        return metrics.mcc(truth, predicted.argmax(1))


@final
@dataclass(frozen=True, kw_only=True)
class Labels(_PerSequence):
    """Any number of labels per sequence."""

    metrics: ClassVar = metrics.OF_LABELS
    classes: tuple[str, ...]

    def outputs(self) -> int:
        return len(self.classes)

    def loss(self, result: Tensor, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(result, batch["targets"])

    def predicted(self, result: Tensor, batch: Batch) -> list[Predicted]:
        return list(result.sigmoid().cpu().numpy())

    def measured(self, truth: Rows, predicted: Rows) -> dict[str, float]:
        return metrics.of_labels(np.stack(list(truth)), np.stack(list(predicted)))

    def headline(self, truth: Predicted, predicted: Predicted) -> float:
        """Return the first of the metrics; 0 if every label is always there or never."""
        return metrics.label_precision(truth > 0, predicted)


@final
@dataclass(frozen=True, kw_only=True)
class Value(_PerSequence):
    """A number per sequence, standardised for the network."""

    metrics: ClassVar = metrics.OF_VALUES
    centre: float = 0.0
    spread: float = 1.0

    def outputs(self) -> int:
        return 1

    def loss(self, result: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(result.squeeze(-1), (batch["targets"] - self.centre) / self.spread)

    def predicted(self, result: Tensor, batch: Batch) -> list[Predicted]:
        return list((result.squeeze(-1) * self.spread + self.centre).cpu().numpy())

    def measured(self, truth: Rows, predicted: Rows) -> dict[str, float]:
        return metrics.of_values(np.array(truth), np.array(predicted))

    def headline(self, truth: Predicted, predicted: Predicted) -> float:
        """Return the first of the metrics."""
        return metrics.spearman(truth, predicted)


@final
@dataclass(frozen=True, kw_only=True)
class EveryLetter:
    """A class per letter, or per token of several letters."""

    metrics: ClassVar = metrics.OF_LETTERS
    per_letter: ClassVar = True
    classes: tuple[str, ...]
    smoothing: float = 0.0

    def head(self, width: int, *, pool: Pool, dropout: float, length: int) -> nn.Module:
        return TokenHead(width, len(self.classes), dropout=dropout)

    def loss(self, result: Tensor, batch: Batch) -> Tensor:
        total = F.cross_entropy(
            result.flatten(0, 1),
            batch["targets"].flatten(),
            ignore_index=UNLABELLED,
            label_smoothing=self.smoothing,
            reduction="sum",
        )
        # A batch without any label, which a mean would make no number of.
        return total / self.count(batch).clamp_min(1)

    def count(self, batch: Batch) -> Tensor:
        return (batch["targets"] != UNLABELLED).sum()

    def predicted(self, result: Tensor, batch: Batch) -> list[Predicted]:
        return _rows(result.argmax(-1), batch["targets"] != UNLABELLED)

    def truth(self, batch: Batch) -> list[Predicted]:
        return _rows(batch["targets"], batch["targets"] != UNLABELLED)

    def measured(self, truth: Rows, predicted: Rows) -> dict[str, float]:
        return metrics.of_letters(truth, predicted)


@final
@dataclass(frozen=True, kw_only=True)
class NextToken:
    """The next token."""

    metrics: ClassVar = metrics.OF_NEXT
    per_letter: ClassVar = True
    vocab_size: int
    unknown: int | None = None
    """The unknown token, which is neither trained on nor evaluated."""

    def head(self, width: int, *, pool: Pool, dropout: float, length: int) -> nn.Module:
        return NextTokenHead(width, self.vocab_size)

    def loss(self, result: Tensor, batch: Batch) -> Tensor:
        targets = batch["tokens"][:, 1:].masked_fill(~self._real(batch), UNLABELLED)
        total = F.cross_entropy(
            result[:, :-1].flatten(0, 1),
            targets.flatten(),
            ignore_index=UNLABELLED,
            reduction="sum",
        )
        return total / self.count(batch).clamp_min(1)

    def count(self, batch: Batch) -> Tensor:
        return self._real(batch).sum()

    def predicted(self, result: Tensor, batch: Batch) -> list[Predicted]:
        return _rows(result[:, :-1].argmax(-1), self._real(batch))

    def truth(self, batch: Batch) -> list[Predicted]:
        return _rows(batch["tokens"][:, 1:], self._real(batch))

    def measured(self, truth: Rows, predicted: Rows) -> dict[str, float]:
        right = sum(int((a == b).sum()) for a, b in zip(truth, predicted, strict=True))
        return {"letter_accuracy": right / max(1, sum(len(row) for row in truth))}

    def _real(self, batch: Batch) -> Tensor:
        """Return which tokens after the first count."""
        real = batch["mask"][:, 1:]
        return real if self.unknown is None else real & (batch["tokens"][:, 1:] != self.unknown)


Target: TypeAlias = OneClass | Labels | Value | EveryLetter | NextToken


def _rows(table: Tensor, stored: Tensor) -> list[Predicted]:
    """Return the selected numbers of each row."""
    pairs = zip(table.cpu(), stored.cpu(), strict=True)
    return [row[known].numpy() for row, known in pairs]
