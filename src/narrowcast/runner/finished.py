"""Whether a run has nothing left to do."""

from collections.abc import Sequence
from pathlib import Path

from narrowcast.runner.changes import continued
from narrowcast.runs import RunFolder
from narrowcast.training.checkpoints.checkpoint import latest, step_of
from narrowcast.training.checkpoints.export import PENDING, WEIGHTS


def finished(folder: str | Path, overrides: Sequence[str] = ()) -> int:
    """Return the steps that the run in `folder` has done if nothing is left to do; else 0."""
    with RunFolder.open(folder) as run:
        steps = continued(run, overrides)[1].recipe.steps
        return steps if finished_at(run, steps) else 0


def finished_at(run: RunFolder, steps: int) -> bool:
    """Say whether `run` has done `steps` steps and written all that they led to.

    Weights older than the last checkpoint are those of a shorter run that was continued.
    """
    last, weights = latest(run.checkpoints), run.path / WEIGHTS
    pending = (run.path / PENDING).exists()
    if last is None or step_of(last) != steps or not weights.exists() or pending:
        return False
    return weights.stat().st_mtime_ns >= last.stat().st_mtime_ns
