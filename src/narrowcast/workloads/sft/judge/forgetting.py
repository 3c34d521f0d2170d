"""What is left of tasks that were learnt one after another, and of what came before them."""

import math
from dataclasses import dataclass

from narrowcast.errors import ConfigError

Row = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """Accuracies of tasks in the order they were learnt, each measured after each."""

    matrix: tuple[Row, ...]
    """`matrix[i][j]`: on task j, once task i has been learnt."""
    baselines: Row = ()
    """On each task, learnt by itself; forward transfer is measured from them."""

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
        """AA: over all tasks, at the end."""
        return _mean(self.matrix[-1])

    @property
    def backward_transfer(self) -> float:
        """BWT: what the tasks but the last have gained since they were learnt; below 0: forgotten.

        NaN of a single task.
        """
        last = self.matrix[-1]
        return _mean([last[t] - self.matrix[t][t] for t in range(len(last) - 1)])

    @property
    def forward_transfer(self) -> float:
        """FWT: what the tasks but the first gained from those before them.

        NaN of a single task.
        """
        if not self.baselines:
            raise ConfigError("Forward transfer needs baselines. Give one per task.")
        learnt = [row[t] for t, row in enumerate(self.matrix)]
        gained = [own - alone for own, alone in zip(learnt, self.baselines, strict=True)]
        return _mean(gained[1:])


def _mean(values: Row | list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
