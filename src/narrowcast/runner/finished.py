"""Whether a run has nothing left to do."""

from narrowcast.runs import RunFolder
from narrowcast.training.checkpoints.checkpoint import latest, step_of

WEIGHTS = "model.safetensors"


def finished_at(run: RunFolder, steps: int) -> bool:
    """Say whether `run` has done `steps` steps and exported the weights they led to.

    Weights older than the last checkpoint are those of a shorter run that was continued.
    """
    last, weights = latest(run.checkpoints), run.path / WEIGHTS
    if last is None or step_of(last) != steps or not weights.exists():
        return False
    return weights.stat().st_mtime_ns >= last.stat().st_mtime_ns
