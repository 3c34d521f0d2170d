"""Taking a run up again: its last checkpoint, the model it fits, the records up to it."""

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
"""A step before those of all records, some of which are written before the first step."""
SHOWN = 3
"""Differences between two models that a message lists; the first ones tell the rest."""


def latest_state(run: RunFolder) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint of `run`, or None before the first one.

    Changes nothing. A damaged checkpoint raises `CheckpointError`.
    """
    path = latest(run.checkpoints)
    if path is None:
        return None
    state = load_checkpoint(path)
    require_run_state(state, path)
    return state


def rewind_to(run: RunFolder, state: dict[str, Any] | None) -> list[Record]:
    """Drop the records after the checkpoint `state` comes from, or all; return those left.

    Afterwards the records are those of a run that has just saved that checkpoint, even where the
    run was killed between saving it and recording it.
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
    """Refuse a checkpoint whose model has other parameters than `model`, before it is loaded."""
    here = shapes(model)
    differences = [
        f"{name} is {_shape(saved.get(name))} in the checkpoint and {_shape(here.get(name))} here"
        for name in [*saved, *(name for name in here if name not in saved)]
        if saved.get(name) != here.get(name)
    ]
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise CheckpointError(
            f"the checkpoint of step {step} is of another model: "
            f"{'; '.join(differences[:SHOWN])}{more}; nothing was loaded. Resume with the settings "
            "its run was started with, or start a new run"
        )


def _shape(shape: list[int] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape)) or "a number"
