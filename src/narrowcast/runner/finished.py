"""Whether a run has nothing left to do."""

from narrowcast.runs import RunFolder
from narrowcast.training.checkpoints.checkpoint import latest, step_of
from narrowcast.training.checkpoints.export import PENDING, WEIGHTS


def finished_at(run: RunFolder, steps: int) -> bool:
    """Say whether `run` has done `steps` steps and written all that they led to.

    Weights older than the last checkpoint are those of a shorter run that was continued.
    """
    last, weights = latest(run.checkpoints), run.path / WEIGHTS
    pending = (run.path / PENDING).exists()
    if last is None or step_of(last) != steps or not weights.exists() or pending:
        return False
    return weights.stat().st_mtime_ns >= last.stat().st_mtime_ns
