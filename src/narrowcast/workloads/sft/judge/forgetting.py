"""Forgetting and transfer of tasks learned one after another."""

import math
from dataclasses import dataclass

from narrowcast.errors import ConfigError

Row = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """Accuracies of tasks, measured after learning each of them."""

    matrix: tuple[Row, ...]
    """`matrix[i][j]`: accuracy on task j after learning task i."""
    baselines: Row = ()
    """Accuracy of each task learned alone, for forward transfer."""

    def __post_init__(self) -> None:
        count = len(self.matrix)
        if not count or any(len(row) != count for row in self.matrix):
            raise ConfigError(
                "The matrix must have one row per learnt task, with one accuracy per task, got "
                f"{count} rows of {[len(row) for row in self.matrix]} accuracies."
            )
        if self.baselines and len(self.baselines) != count:
            raise ConfigError(
                f"baselines must be one per task or none, got {len(self.baselines)} for {count} "
                "tasks."
            )

    @property
    def average(self) -> float:
        """AA: mean accuracy over all tasks at the end."""
        return _mean(self.matrix[-1])

    @property
    def backward_transfer(self) -> float:
        """BWT: mean change since a task was learned, below 0 for forgetting; NaN for one task."""
        last = self.matrix[-1]
        return _mean([last[t] - self.matrix[t][t] for t in range(len(last) - 1)])

    @property
    def forward_transfer(self) -> float:
        """FWT: mean gain from earlier tasks over the baselines; NaN for one task."""
        if not self.baselines:
            raise ConfigError("Forward transfer needs baselines. Give one per task.")
        learnt = [row[t] for t, row in enumerate(self.matrix)]
        gained = [own - alone for own, alone in zip(learnt, self.baselines, strict=True)]
        return _mean(gained[1:])


def _mean(values: Row | list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
