"""Resuming a run: its last checkpoint, its model, and its records up to there."""

import math
from typing import Any

from torch import nn

from narrowcast.errors import CheckpointError
from narrowcast.runs import CheckpointRecord, Record, RunFolder
from narrowcast.runs.folder import RECORDS
from narrowcast.training.checkpoints.checkpoint import checkpoint_bytes, latest, load_checkpoint
from narrowcast.training.checkpoints.parts import require_run_state
from narrowcast.training.checkpoints.records_identity import is_as_written

BEFORE_ALL = -1
"""A step before all records, some of which are written before step 1."""
SHOWN = 3
"""Differences that a message lists."""


def latest_state(run: RunFolder) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint of `run`, or None; a damaged one raises."""
    path = latest(run.checkpoints)
    if path is None:
        return None
    state = load_checkpoint(path)
    require_run_state(state, path)
    return state


def rewind_to(run: RunFolder, state: dict[str, Any] | None) -> list[Record]:
    """Drop the records after a checkpoint, or all; return the rest.

    If the run was killed between saving the checkpoint and recording it, its record is added.
    """
    if state is None:
        return run.rewind(BEFORE_ALL)
    step, saved = int(state["step"]), state.get("records", {})
    unchanged = bool(saved) and is_as_written(run.path / RECORDS, saved)
    left = run.rewind(step, saved_bytes=int(saved["bytes"]) if unchanged else None)
    recorded = any(isinstance(r, CheckpointRecord) and r.step == step for r in left)
    path = latest(run.checkpoints)
    if path is not None and not recorded:
        # How long it took is not known any more.
        unknown = math.nan
        size = checkpoint_bytes(path)
        saved = CheckpointRecord(
            step=step, seconds_blocked=unknown, seconds_total=unknown, bytes=size
        )
        run.write(saved)
        left.append(saved)
    return left


def shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shape of every parameter and buffer of `model`, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: list(tensor.shape) for name, tensor in named}


def require_same_model(saved: dict[str, list[int]], model: nn.Module, *, step: int) -> None:
    """Raise if the checkpoint's model has other parameters than `model`."""
    here = shapes(model)
    differences = [
        f"{name} is {_shape(saved.get(name))} in the checkpoint and {_shape(here.get(name))} here"
        for name in [*saved, *(name for name in here if name not in saved)]
        if saved.get(name) != here.get(name)
    ]
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise CheckpointError(
            f"The checkpoint of step {step} has another model: "
            f"{'; '.join(differences[:SHOWN])}{more}. Nothing was loaded. Resume with the settings "
            "of its run, or start a new run."
        )


def _shape(shape: list[int] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape)) or "a number"
