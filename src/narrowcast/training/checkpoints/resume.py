"""Resuming a run: its last checkpoint, its model, and its records up to there."""

import hashlib
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from narrowcast.errors import CheckpointError
from narrowcast.plain_files import open_plain
from narrowcast.runs import CheckpointRecord, Record, RunFolder, StepRecord
from narrowcast.runs.commands import resume_command
from narrowcast.runs.folder import RECORDS
from narrowcast.runs.writing import explain_write_error
from narrowcast.training.checkpoints.checkpoint import (
    checkpoint_bytes,
    checkpoint_step,
    latest,
    load_checkpoint,
)

BEFORE_ALL = -1
"""A step before all records, some of which are written before step 1."""
SHOWN = 3
"""Differences that a message lists."""


def latest_state(run: RunFolder) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint of `run`, or None; a damaged one raises.

    The shards of a sharded model stay on the disk.
    """
    path = latest(run.checkpoints)
    if path is None:
        return None
    state = load_checkpoint(path, shards=False)
    if state.get("step") != checkpoint_step(path):
        raise CheckpointError(
            f"{path} must have the state of its step, got step {state.get('step')}. Remove it to "
            "resume from an older checkpoint."
        )
    return state


def rewind_to(run: RunFolder, state: dict[str, Any] | None) -> list[Record]:
    """Drop the records after a checkpoint, or all; add its own record if it is missing."""
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


@contextmanager
def blamed_on_part(step: int, name: str) -> Iterator[None]:
    """Name the part of the checkpoint in errors raised inside the block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"Cannot restore the {name} from the checkpoint of step {step}. {error}"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"Cannot restore the {name} from the checkpoint of step {step} "
            f"({type(error).__name__}: {error}). Remove the checkpoint to resume from an older "
            "one, or use the version that saved it."
        ) from error


CHUNK = 2**20


@final
class RecordsDigest:
    """Incremental digest of a growing file."""

    def __init__(self) -> None:
        self._read, self._digest = 0, hashlib.sha256()

    def upto_now(self, folder: Path) -> dict[str, Any]:
        """Sync the records, and return their size and digest, or 0 and "" without records.

        After a power cut, a synced checkpoint then has the records of its steps.
        """
        try:
            with open_plain(folder / RECORDS, follow=True) as file:
                os.fsync(file.fileno())
                if os.fstat(file.fileno()).st_size < self._read:  # another file by now
                    self._read, self._digest = 0, hashlib.sha256()
                file.seek(self._read)
                while chunk := file.read(CHUNK):
                    self._digest.update(chunk)
                    self._read += len(chunk)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CheckpointError(
                f"Cannot read {folder / RECORDS}: {explain_write_error(error)}. Then run "
                f"`{resume_command(folder)}`."
            ) from error
        return {"bytes": self._read, "sha256": self._digest.hexdigest()}


def require_records(
    run: RunFolder, state: Mapping[str, Any] | None, *, accept: Collection[str] = ()
) -> None:
    """Raise if the records differ from what the run wrote up to its checkpoint."""
    done = 0 if state is None else int(state["step"])
    records = run.records()  # what is damaged is said here
    if state is None or "records" in accept:
        return
    saved = state.get("records", {})  # restoring an older checkpoint raises
    if not saved or is_as_written(run.path / RECORDS, saved):
        return
    steps = [r.step for r in records if isinstance(r, StepRecord) and r.step <= done]
    wrong = _wrong_steps(steps, done) or "has other values up to the checkpoint"
    raise CheckpointError(
        f"{run.path / RECORDS} was changed after the run wrote it: it {wrong}. Restore it from a "
        "copy, or add --accept records (in Python accept=['records']) to continue with it."
    )


def _wrong_steps(steps: list[int], done: int) -> str:
    expected = range(1, done + 1)
    if steps == list(expected):
        return ""
    missing = sorted(set(expected) - set(steps))
    if not missing:
        return "has steps twice or out of order"
    return (
        f"lacks {len(missing)} of the {done} steps before its checkpoint, the first is step "
        f"{missing[0]}"
    )


def is_as_written(file: Path, saved: Mapping[str, Any]) -> bool:
    """Return whether a file still starts with what was saved of it."""
    digest, left = hashlib.sha256(), int(saved.get("bytes", 0))
    try:
        with open_plain(file, follow=True) as content:
            while left > 0 and (chunk := content.read(min(left, CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
    except FileNotFoundError:
        pass
    return digest.hexdigest() == saved.get("sha256")
